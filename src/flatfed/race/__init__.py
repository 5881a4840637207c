"""The race of all algorithms on tasks of real data, and what it recommends for a task of one's own."""
