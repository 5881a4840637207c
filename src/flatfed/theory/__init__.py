"""The papers' theorems and bounds, as functions of constants and of an algorithm's parts.

A theorem is a function that returns a `Statement`: its value, its conditions and whether they hold, and how
far it can be trusted. Each paper has its file; `stability` has bounds for any composition. Nothing here is
measured: `flatfed.diagnostics` does that.
"""

from flatfed.theory.statement import Condition, Label, Setting, Statement

__all__ = ["Condition", "Label", "Setting", "Statement"]
