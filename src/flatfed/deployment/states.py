"""The server's last states, to which its operator can go back.

states/round-N/   a copy of checkpoint/ as it was after N rounds
restarts.json     how often the run has gone back; sites hear it and drop what came after
abandoned-K/      what the run was before it went back for the Kth time: history, checkpoint and states
"""

from __future__ import annotations

import shutil
from pathlib import Path

from flatfed.core.errors import FlatfedError
from flatfed.runs.checkpoint import Manifest
from flatfed.runs.files import read_json, write_atomically, write_json
from flatfed.runs.lock import Lock
from flatfed.training.loop import Progress


class KeptStates:
    """Earlier checkpoints of a run, beside the one from which it would go on."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.checkpoint, self.states = folder / "checkpoint", folder / "states"
        self.restarts_path = folder / "restarts.json"

    @property
    def rounds(self) -> list[int]:
        """After how many rounds states are kept."""
        numbers = [path.name.removeprefix("round-") for path in self.states.glob("round-*")]
        return sorted(int(number) for number in numbers if number.isdecimal())

    @property
    def restarts(self) -> int:
        if not self.restarts_path.exists():
            return 0
        content = read_json(self.restarts_path)
        number = content.get("restarts") if isinstance(content, dict) else None
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise FlatfedError(f"{self.restarts_path}: damaged; restore it or choose another folder")
        return number

    def hint(self, tried: int | None) -> str:
        """How to go back, further than to a state that was tried: the end of an error's line."""
        rounds = [number for number in self.rounds if tried is None or number < tried]
        numbers = ", ".join(map(str, rounds))
        return f"; to go back, start with --from-round {rounds[-1]} (kept: {numbers})" if rounds else ""

    def add(self, progress: Progress) -> None:
        """Copies the last checkpoint, which the round that has just ended is about to replace."""
        if self.keep == 0 or not (self.checkpoint / "manifest.json").exists():
            return
        kept, temporary = self.states / f"round-{progress.round - 1}", self.states / ".new"
        for path in (temporary, kept):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.checkpoint, temporary, ignore=shutil.ignore_patterns(".*"))
        temporary.rename(kept)
        for number in self.rounds[: -self.keep]:
            shutil.rmtree(self.states / f"round-{number}")

    def go_back(self, number: int) -> None:
        """Makes the state after so many rounds the one from which the run goes on."""
        state = self.states / f"round-{number}"
        if number not in self.rounds:
            kept = ", ".join(map(str, self.rounds)) or "none"
            raise FlatfedError(
                f"from_round = {number}: {self.folder} has no such state; choose one that is kept ({kept})"
            )
        if Manifest.read(state / "manifest.json").round != number:
            raise FlatfedError(f"{state}: damaged, it is of another round; choose another one")
        if Lock(self.checkpoint / ".lock").is_taken():
            raise FlatfedError(f"{self.folder}: another process is running it; wait or stop that one")
        restarts = self.restarts + 1
        abandoned = self.folder / f"abandoned-{restarts}"
        _copy(self.checkpoint, abandoned / "checkpoint")
        history = self.folder / "history.jsonl"
        if history.exists():
            write_atomically(abandoned / history.name, history.read_bytes())
        for later in [later for later in self.rounds if later > number]:
            (self.states / f"round-{later}").rename(abandoned / f"round-{later}")
        # Told to the sites before the first message from there, whatever happens in between.
        write_json(self.restarts_path, {"restarts": restarts})
        _copy(state, self.checkpoint)


def _copy(source: Path, target: Path) -> None:
    """The files of a checkpoint; the manifest comes last, so that it always names complete ones."""
    target.mkdir(parents=True, exist_ok=True)
    source.mkdir(exist_ok=True)
    files = [path for path in source.iterdir() if path.is_file() and not path.name.startswith(".")]
    for path in sorted(files, key=lambda path: path.name == "manifest.json"):
        write_atomically(target / path.name, path.read_bytes())
