"""The one rule of the fuzz tests, and what they share.

Whatever a user feeds flatfed, it answers with a correct result or with one clear line and exit code 2 (1 for
a training that diverged): never with a traceback, after more than ten seconds, with more than two gigabytes,
or by changing a file that is not its own.
"""

import hashlib
import io
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, settings

from flatfed.cli import app

SECONDS, BYTES = 10, 2 * 2**30
ALARM = signal.SIGRTMIN + 1
"""A signal that neither fuzzers nor flatfed use."""
SOME = settings(max_examples=20, suppress_health_check=list(HealthCheck))
"""As many examples as `make test` has time for; tests/fuzz/nightly.py goes on for as long as it is told."""


class RuleBrokenError(BaseException):
    """No exception that the program might catch."""


@contextmanager
def limits(seconds: float = SECONDS, memory: int = BYTES) -> Iterator[None]:
    """Ends what takes too long, and lets allocations fail beyond `memory` more bytes."""
    started, processor = time.monotonic(), time.process_time()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(1):
            waited, computed = time.monotonic() - started, time.process_time() - processor
            # On a busy machine an answer may take longer without being slow.
            if computed > seconds or waited > 6 * seconds:
                signal.pthread_kill(threading.main_thread().ident or 0, ALARM)
                return

    def expired(number: int, frame: FrameType | None) -> None:
        raise RuleBrokenError(f"no answer after {time.monotonic() - started:.0f} s")

    limit = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = signal.signal(ALARM, expired)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, limit[1]))
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        signal.signal(ALARM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed at the end; hypothesis does not make a new `tmp_path` for every example."""
    folder = Path(tempfile.mkdtemp(prefix="flatfed-fuzz-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Fails if a file below the folder was changed, added or removed meanwhile."""
    before = _contents(folder)
    yield
    after = _contents(folder)
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not differing, f"files changed in {folder}: {sorted(differing)}"


def _contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass(frozen=True)
class Answer:
    code: int
    output: str
    error: str


def command(*arguments: object) -> Answer:
    """What `flatfed ARGUMENTS` answers, in this process; fails if that breaks the rule."""
    output, error = io.StringIO(), io.StringIO()
    words = [str(argument) for argument in arguments]
    with limits(), redirect_stdout(output), redirect_stderr(error):
        try:
            app(words, standalone_mode=True)
            code: object = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    answer = Answer(int(str(code)), output.getvalue(), error.getvalue())
    assert "Traceback" not in answer.error, answer.error
    if answer.code == 1:
        assert "error:" in answer.error and ("diverge" in answer.error or "finite" in answer.error), answer
    else:
        assert answer.code in (0, 2), answer
    if answer.code == 2:
        _check_complaint(answer.error)
    return answer


def _check_complaint(error: str) -> None:
    """One line that starts with "error:", after notes; or the usage that the command line's parser prints."""
    lines = [line for line in error.splitlines() if line.strip() and not line.startswith("note:")]
    if lines and not lines[0].startswith(("Usage:", "error:")):
        lines = [line for line in lines if line.startswith("error:")] or lines  # behind a progress bar
    assert lines, "no reason was given"
    assert lines[0].startswith("Usage:") or (lines[0].startswith("error:") and len(lines) == 1), error


if __name__ == "__main__":
    sys.exit("this file is shared by the fuzz tests; run them with `make fuzz` or pytest")
