"""Data sets, ways to divide them among clients, and federations."""
