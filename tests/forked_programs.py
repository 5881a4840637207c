"""Flower's programs, started by their names as ever, in forked processes instead of fresh ones.

Flower starts a Python process for every message, which spends seconds on importing torch. Here a server has
imported everything once. What is started in place of a program is a launcher of its name, which hands its
words, environment, folder and open files to the server; the program runs in a fork of that, hears the
launcher's signals, ends with it however that ends, and gives it its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

POLLING = ("flwr.superlink.grid.http_grid", "flwr.supernode.start_client_internal")
"""Flower's modules that look for messages every three seconds; here they look after `PAUSE`."""
PAUSE = 0.3
PRELOADED = ("flatfed.deployment", "flatfed.data.datasets", "sklearn.datasets")
Programs = Mapping[str, Callable[[], int | None]]
ADDRESS = "FORKED_PROGRAMS"
LENGTH = struct.Struct("!Q")
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""

LAUNCHER = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + os.environ["{ADDRESS}"])
request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
answer = server.recv(1)
if not answer:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(answer[0])
"""


def programs_of_flower() -> dict[str, metadata.EntryPoint]:
    scripts = metadata.distribution("flwr").entry_points.select(group="console_scripts")
    return {script.name: script for script in scripts}


@contextlib.contextmanager
def forked_programs(folder: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which Flower's programs are forked from a server that lives as long as the block."""
    programs, address = folder / "programs", f"flatfed-{uuid.uuid4()}"
    programs.mkdir()
    for name in programs_of_flower():
        (programs / name).write_text(LAUNCHER)
        (programs / name).chmod(0o700)
    path = f"{programs}{os.pathsep}{environment['PATH']}"
    changed = {**environment, "PATH": path, ADDRESS: address}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{address}")  # without a file
        listening.listen(64)
        words = [sys.executable, __file__, str(listening.fileno())]
        server = subprocess.Popen(words, env=changed, pass_fds=[listening.fileno()], start_new_session=True)
    try:
        yield changed
    finally:
        server.kill()
        server.wait()


def serve(listening: socket.socket) -> None:
    """Forks a process for every launcher that calls; nobody waits for them."""
    programs = {name: script.load() for name, script in programs_of_flower().items()}
    for name in PRELOADED:
        importlib.import_module(name)
    clock = SimpleNamespace(**vars(time))
    clock.sleep = lambda seconds: time.sleep(min(seconds, PAUSE))
    for name in POLLING:
        importlib.import_module(name).time = clock
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        launcher, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os._exit(supervise(launcher, programs))
        launcher.close()


def supervise(launcher: socket.socket, programs: Programs) -> int:
    """Runs a program in a process below this one, and passes on signals, its end and that of its launcher."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start, files, *_ = socket.recv_fds(launcher, LENGTH.size, 3)
    (size,) = LENGTH.unpack(start)
    request = b""
    while len(request) < size:
        request += launcher.recv(size - len(request))
    program = os.fork()
    if program == 0:
        launcher.close()
        run(programs, files, *json.loads(request))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while True:
        ready, _, _ = select.select([launcher, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            if code >= 0:
                launcher.sendall(bytes([code]))
            return 0
        signals = launcher.recv(16)
        for number in signals or [signal.SIGKILL]:
            os.kill(program, number)


def run(
    programs: Programs, files: list[int], words: list[str], folder: str, environment: dict[str, str]
) -> None:
    code = 1
    try:
        die_with_parent()
        for number in (0, 1, 2):
            os.dup2(files[number], number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        sys.argv = words
        code = programs[Path(words[0]).name]() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
