"""The diagnostics by name.

Decorating a function with `diagnostic` is all that enrols it: the command line lists, runs and summarises it,
`flatfed.diagnostics.NAME` is the function, and reports show it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from flatfed.diagnostics.figures import Content, Measurements, Result, Table

Measure = TypeVar("Measure", bound=Callable[..., dict[str, Any]])
OtherRun = Annotated[str, "run folder"]
"""An option that is another run's folder: the result depends on that run's last checkpoint too."""


@dataclass(frozen=True)
class Diagnostic:
    """A measurement of a model and its training, and how it is told."""

    measure: Callable[..., dict[str, Any]]
    """Takes a subject, its options and `tick` as keywords; its result is written as JSON."""
    section: str
    """Where in a report it is shown."""
    summary: Callable[[Result], str]
    """The result in one line for the terminal."""
    show: Callable[[Measurements], Content]
    """The figures and tables of a report."""
    cheap: bool
    """Whether it is measured unless others are named: about as much work as an evaluation or a round."""
    tables: Callable[[Result], Sequence[Table]] = lambda result: ()
    """What the terminal shows of a result beside its line."""

    @property
    def title(self) -> str:
        return inspect.cleandoc(self.measure.__doc__ or "").partition("\n")[0]

    @property
    def option_types(self) -> dict[str, Any]:
        hints = get_type_hints(self.measure, include_extras=True)
        keys = [key for key in inspect.signature(self.measure).parameters if key not in {"subject", "tick"}]
        return {key: hints.get(key, Any) for key in keys}

    @property
    def run_options(self) -> set[str]:
        """The options that are other runs' folders."""
        return {key for key, kind in self.option_types.items() if kind == OtherRun}

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options' defaults, and those of the given ones that it knows."""
        parameters = inspect.signature(self.measure).parameters
        return {key: given.get(key, parameters[key].default) for key in self.option_types}


DIAGNOSTICS: dict[str, Diagnostic] = {}
MISUNDERSTANDINGS = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What `summary` and `show` may raise about a result that is not as `measure` returns it."""


def diagnostic(
    section: str,
    summary: Callable[[Result], str],
    show: Callable[[Measurements], Content],
    *,
    cheap: bool = False,
    tables: Callable[[Result], Sequence[Table]] = lambda result: (),
) -> Callable[[Measure], Measure]:
    """Enrols a function of a subject under its name; see `Diagnostic` for the parts."""

    def register(measure: Measure) -> Measure:
        DIAGNOSTICS[measure.__name__] = Diagnostic(measure, section, summary, show, cheap, tables)
        return measure

    return register


def diagnostic_names() -> list[str]:
    """All of them, the cheap ones first."""
    return sorted(DIAGNOSTICS, key=lambda name: (not DIAGNOSTICS[name].cheap, name))


def cheap_diagnostics() -> list[str]:
    return [name for name in diagnostic_names() if DIAGNOSTICS[name].cheap]
