"""The command line in processes of its own.

They are forked from one that has imported everything: a fresh interpreter would spend seconds on torch.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

from flatfed.cli import main

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["flatfed.cli", "flatfed.papers", "flatfed.report", "flatfed.diagnostics", "command"]
)


def _call(arguments: list[str], cwd: str, output: str) -> None:
    import sys

    os.chdir(cwd)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["flatfed", *arguments]
    main()


class Command:
    """A command that has been started."""

    def __init__(self, *arguments: object, cwd: Path | None = None) -> None:
        self._output = tempfile.TemporaryDirectory()
        given = ([str(argument) for argument in arguments], str(cwd or Path.cwd()), self._output.name)
        self._process = _server.Process(target=_call, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def finished(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout:g} s"
        with self._output:
            printed = [Path(self._output.name, name) for name in ("stdout", "stderr")]
            texts = [path.read_text() if path.exists() else "" for path in printed]
        return subprocess.CompletedProcess([], code, *texts)


def flatfed(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return Command(*arguments, cwd=cwd).finished()
