"""Errors and warnings that name the field, the bad value and the fix, in one line."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

from pydantic import ValidationError


class FlatfedError(ValueError):
    """Something the user can fix; its text is one line that says what is wrong and how to fix it."""

    def __init__(self, message: str = "") -> None:
        # Names of files and columns may hold anything.
        super().__init__(printable(message))


class DivergedError(FlatfedError):
    """Training left the finite numbers."""


class FlatfedWarning(UserWarning):
    """Something that works but is unlikely to be what was meant."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(known)}"


def match_name(option: str, name: object, known: Iterable[str]) -> str:
    """The known name that is meant: FedLESAM-S, fedlesam_s and fedlesams are one."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    known = {plain(text): text for text in known}
    if not isinstance(name, str) or plain(name) not in known:
        raise FlatfedError(f"{option} = {shown(name)}: unknown; {did_you_mean(shown(name), known.values())}")
    return known[plain(name)]


def check_choice(option: str, value: object, known: Iterable[str]) -> None:
    """Refuse a value that is not one of the known names."""
    known = list(known)
    if value not in known:
        raise FlatfedError(f"{option} = {shown(value)}: unknown; {did_you_mean(str(value)[:60], known)}")


def checked_client(client: object, clients: int) -> int:
    """The number of a client that there is."""
    try:
        number = -1 if isinstance(client, bool) else index(client)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < clients:
        raise FlatfedError(f"client = {shown(client)}: give a number, 0 … {clients - 1}")
    return number


def one_line(error: ValidationError, known: Iterable[str] = (), prefix: str = "") -> str:
    """The first complaint of a validation as `field = value: reason`, and how many more there are."""
    complaints, known = error.errors(), list(known)
    first = complaints[0]
    kind, unknown = first["type"], first["type"] in {"extra_forbidden", "unexpected_keyword_argument"}
    # The first item is a field, and so is the last one if it is unknown; they may be called "int".
    field_places = {0, len(first["loc"]) - 1} if unknown else {0}
    names = [
        str(item)[:60]
        for place, item in enumerate(first["loc"])
        if place in field_places or not _is_noise(item)
    ]
    if names and isinstance(first["loc"][0], int) and first["loc"][0] < len(known):
        names[0] = known[first["loc"][0]]  # a positional argument
    field = ".".join([prefix, *names] if prefix else names)
    if unknown:
        line = f"{field}: unknown; {did_you_mean(names[-1], known)}"
    elif kind in {"missing", "missing_argument"}:
        line = f"{field}: missing; give it a value"
    elif kind == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        # The complaint of a nested table begins with the name of its own field.
        nested = isinstance(first.get("ctx", {}).get("error"), FlatfedError)
        line = f"{field}{'.' if nested else ': '}{message}" if field else message
    else:
        message = first["msg"][0].lower() + first["msg"][1:]
        line = f"{field} = {shown(first['input'])}: {message}"
    more = len(complaints) - 1
    return line + (f" (and {more} more)" if more and kind != "union" else "")


def _is_noise(item: Any) -> bool:
    """Parts of pydantic's location that name a type rather than a field."""
    return isinstance(item, str) and ("[" in item or item in {"int", "float", "str", "bool", "none"})


def shown(value: Any) -> str:
    """A value in one short line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "…"


def first_line(error: BaseException) -> str:
    """What an error says in one line, or its kind if it says nothing."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []  # a user's class that cannot be printed
    return lines[0] if lines else type(error).__name__


def memory_ran_out(error: BaseException) -> bool:
    """Whether this is Python's or torch's word for it; torch has none of its own on the CPU."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or "can't allocate memory" in first_line(error)


USER_ERRORS = (Exception, SystemExit)
"""What a user's function may raise; to leave the program is no more its business than any other error."""


@contextmanager
def user_errors(place: str) -> Iterator[None]:
    """Whatever a user's function raises, in one line that says which; the cause stays attached."""
    try:
        yield
    except FlatfedError:
        raise
    except USER_ERRORS as error:
        if memory_ran_out(error):
            raise
        raise FlatfedError(f"{place} raised {type(error).__name__}: {first_line(error)}") from error


def name_of(function: object) -> str:
    """What a user's function, or the class of a user's object, is called."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def printable(text: str) -> str:
    """Text that may come from anywhere as one line that a terminal shows as it is."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def brief(error: BaseException) -> str:
    """An error's text as one short line."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "…"
