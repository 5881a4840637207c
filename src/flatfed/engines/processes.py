"""A pool of worker processes, each of which trains a chunk of clients at a time.

Threads that call many small operations spend their time waiting for each other's turn at the interpreter;
processes do not. They are forked, so they see the model, the loss and the data as they are without any of it
being sent, and whatever memory they only read stays shared. Beside an accelerator, which does not survive a
fork, they begin anew (`Portable`). Jobs and answers go through a pipe, the tensors in them through memory
that both ends see.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flatfed.core import task_files
from flatfed.core.errors import FlatfedError, first_line
from flatfed.engines import messages
from flatfed.engines.memory import GrowingMemory, keep_freed_memory
from flatfed.engines.scheduler import in_order

LOOK_SECONDS = 5.0
"""How often to look after processes that do not answer."""
PATIENCE = 12
"""So many looks in a row may find one of them stopped."""
_ALIGNMENT = 64
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""

Work = Callable[[Any], Any]


def can_fork() -> bool:
    """Only on Linux is a fork safe; a daemon may have no children.

    Where there is an accelerator, torch refuses to differentiate in a fork of a process that has done so.
    """
    on_linux = hasattr(os, "memfd_create")
    return on_linux and not multiprocessing.current_process().daemon and not torch.accelerator.is_available()


def start_method(device: torch.device) -> Literal["fork", "spawn"] | None:
    """How worker processes begin that train on a device; None where threads have to do."""
    if device.type == "cpu":
        return "fork" if can_fork() else None
    on_linux = hasattr(os, "memfd_create")
    return "spawn" if on_linux and not multiprocessing.current_process().daemon else None


def _written(message: Any, memory: GrowingMemory) -> memoryview:
    """A message as bytes, with its tensors in a memory, one behind the other."""
    end = 0

    def put(tensor: Tensor) -> int:
        nonlocal end
        start, end = end, end + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory.view(start, tensor.dtype, tensor.numel()).copy_(tensor.reshape(-1))
        return start

    return messages.dump(message, put)


def _read(content: bytes, memory: GrowingMemory) -> Any:
    """The inverse of `_written`, whose tensors stay in that memory."""
    return messages.load(
        content, lambda start, dtype, shape: memory.view(start, dtype, shape.numel()).view(shape)
    )


class Portable:
    """Work for processes that begin anew: written down once, its tensors where all of them see them."""

    def __init__(self, work: Work) -> None:
        self._memory, self._files = GrowingMemory(), task_files.loaded()
        try:
            self._content = bytes(_written(work, self._memory))
        except Exception as error:
            # Whatever a user's object raises when it is pickled.
            raise _not_portable("sent to them", error) from error

    def unpacked(self) -> Work:
        try:
            task_files.load_again(self._files)
            work: Work = _read(self._content, self._memory)
        except Exception as error:
            raise _not_portable("made again there", error) from error
        return work


def _not_portable(what: str, error: Exception) -> FlatfedError:
    return FlatfedError(
        "workers: beside an accelerator they begin anew, and the model, the loss, the metrics or the data "
        f"cannot be {what} ({first_line(error)}); use workers = 1, or what is defined at the top of a module "
        "that can be imported"
    )


class Channel:
    """One end of a connection between two processes that speak in turn, with a memory for each direction.

    The tensors of a message are where its sender put them: they last until it sends the next one.
    """

    def __init__(self, connection: Connection, outgoing: GrowingMemory, incoming: GrowingMemory) -> None:
        self.connection, self.outgoing, self.incoming = connection, outgoing, incoming

    def send(self, message: Any) -> None:
        self.connection.send_bytes(_written(message, self.outgoing))

    def receive(self) -> Any:
        return _read(self.connection.recv_bytes(), self.incoming)

    def close(self) -> None:
        self.connection.close()
        self.outgoing.close()
        self.incoming.close()


class RemoteTraceback(Exception):
    """Where in another process an error was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _serve(channel: Channel, parent: int, work: Work | Portable) -> None:
    """What a worker process does until its parent has gone."""
    # A keyboard interrupt reaches all processes; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # With the thread that forked, which is the one that trains.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    keep_freed_memory()
    if os.getppid() != parent:
        return
    # A new thread has none of the settings that torch keeps for each, such as the caller's autocast.
    thread = threading.Thread(target=_answer, args=(channel, work))
    thread.start()
    thread.join()


def _answer(channel: Channel, work: Work | Portable) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = channel.receive()
        except EOFError:
            return
        answer, failure, remote_traceback = None, None, ""
        try:
            work = work.unpacked() if isinstance(work, Portable) else work
            answer = work(job)
        except BaseException as error:
            # Whatever it is, it is raised again in the parent.
            failure, remote_traceback = _portable(error), traceback.format_exc()
        # The process may be killed before it would do this by itself.
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send((answer, failure, remote_traceback))


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # A user's exception may do anything when it is pickled.
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error


class WorkerProcess:
    """One process of the pool."""

    def __init__(self, work: Work | Portable) -> None:
        self.begins_anew = isinstance(work, Portable)
        context: Any = multiprocessing.get_context("spawn" if self.begins_anew else "fork")
        with ExitStack() as opened:
            try:
                jobs, answers = GrowingMemory(), GrowingMemory()
                near, far = multiprocessing.Pipe()
                self.channel = Channel(near, jobs, answers)
                opened.callback(self.channel.close)
                with far:
                    arguments = Channel(far, answers, jobs), os.getpid(), work
                    self.process = context.Process(target=_serve, args=arguments, daemon=True, name="flatfed")
                    self.process.start()
            except OSError as error:
                raise FlatfedError(
                    f"workers: a process cannot be started ({error}); use fewer of them"
                ) from None
            opened.pop_all()

    def start(self, job: Any) -> None:
        try:
            self.channel.send(job)
        except OSError:
            raise self._lost() from None

    def answer(self) -> Any:
        try:
            answer, error, remote_traceback = self.channel.receive()
        except (EOFError, OSError):
            raise self._lost() from None
        if error is not None:
            raise error from RemoteTraceback(remote_traceback)
        return answer

    def _lost(self) -> FlatfedError:
        self.process.join()
        code = self.process.exitcode
        if code is None:
            return FlatfedError(
                "workers: one of their processes ended, and as SIGCHLD is ignored nobody knows how"
            )
        if code == -signal.SIGKILL:
            return FlatfedError(
                "workers: one of their processes was killed (SIGKILL); if memory is short, use fewer of them"
            )
        if self.begins_anew and code == 1:
            return FlatfedError(
                "workers: one of their processes could not begin; a program that trains with several of them "
                "beside an accelerator must start everything below if __name__ == '__main__':"
            )
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return FlatfedError(f"workers: one of their processes ended {how}; workers = 1 may show why")

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        # Nobody is told of its end where SIGCHLD is ignored.
        if self.process.exitcode is not None:
            self.process.close()
        self.channel.close()

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, so that it would not answer before another one comes."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False  # It has ended, which its channel will say.
        return stat.rpartition(")")[2].split()[0] in {"T", "t"}


_FORKING = threading.Lock()
"""One fork at a time: a child that inherited the far end of another's channel would hide that one's end."""


class WorkerPool:
    """Processes that do `work` on jobs, each of which must be something that can be pickled.

    `taken` makes of an answer, as soon as it comes, what is kept of it; it must copy the tensors, which do
    not last.
    """

    def __init__(self, work: Work | Portable, taken: Callable[[Any], Any], size: int) -> None:
        """At most `size` processes, which are started when they are first needed."""
        self._work, self._taken, self._size = work, taken, size
        self._processes: list[WorkerProcess] = []
        self._waiting: list[WorkerProcess] = []
        self._busy: dict[Any, tuple[int, WorkerProcess]] = {}

    @property
    def idle(self) -> int:
        return self._size - len(self._busy)

    def start(self, number: int, job: Any) -> None:
        if not self._waiting:
            with _FORKING:
                self._processes.append(WorkerProcess(self._work))
            self._waiting.append(self._processes[-1])
        process = self._waiting.pop()
        process.start(job)
        self._busy[process.channel.connection] = number, process

    def finished(self) -> Iterator[tuple[int, Any]]:
        for connection in self._answered():
            number, process = self._busy.pop(connection)
            try:
                outcome = self._taken(process.answer())
            except Exception as error:
                outcome = error
            self._waiting.append(process)
            yield number, outcome

    def _answered(self) -> list[Any]:
        """Waits for an answer, but not for ever for one that cannot come."""
        stopped_for = 0
        while not (connections := wait(list(self._busy), LOOK_SECONDS)):
            stopped = [process.process.pid for _, process in self._busy.values() if process.stopped]
            # The first time it may just be about to go on together with this process.
            stopped_for = stopped_for + 1 if stopped else 0
            if stopped_for == PATIENCE:
                raise FlatfedError(
                    f"workers: their process {stopped[0]} has been stopped for {PATIENCE * LOOK_SECONDS:g} "
                    f"seconds; find out by whom, and start or resume the run again"
                )
        return connections

    def in_order(self, jobs: Iterable[Any]) -> Iterator[Any]:
        """The results of jobs in their order; after an error, or when it is left before its end, all
        processes are ended, so that none works on."""
        try:
            yield from in_order(self, jobs, 2 * self._size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes, self._waiting, self._busy = [], [], {}
