"""A site's own files: what its client keeps between the rounds of one run.

    RUN/client-N/state-R.safetensors      the client's vectors after round R
    RUN/client-N/NAME-DIGEST.safetensors  a vector that the server sends only once
    RUN/client-N/restarts                 how often the server has gone back, if it has

A new state is written beside the old ones. Which of them counts is decided by the server's next message,
which names the last round that was merged: so a round that was lost on the way, or whose upload was refused,
leaves no trace. Earlier states stay as long as the server may go back to them. Files are written atomically,
and those of other runs are never looked at.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.flat import all_finite
from flatfed.core.state import State
from flatfed.deployment.wire import Request, digest
from flatfed.runs.files import write_atomically

RESTARTS = "restarts"


class SiteStore:
    """The files of one client of one run."""

    def __init__(self, root: Path, run: str, client: int) -> None:
        self.folder = root / run / f"client-{client}"

    def read_state(self, request: Request, expected: State) -> dict[str, Tensor] | None:
        """The state after the round that was merged last, None if there was none; later ones are dropped."""
        rounds, number, merged = self._rounds(), request.round + 1, request.merged
        went_back = request.restarts - self._restarts()
        if went_back < 0 or (went_back == 0 and rounds and max(rounds) >= number):
            raise FlatfedError(
                f"round {number}: this site has already trained in round {max(rounds, default=-1) + 1}; the "
                "message is out of date"
            )
        state = None
        if merged >= 0:
            if merged not in rounds:
                raise FlatfedError(
                    f"round {number}: the state after round {merged + 1} is not in {self.folder}; put it "
                    "back, or start a new run"
                )
            state = _read(self._state(merged), expected)
        merged_rounds = [round_number for round_number in rounds if round_number <= merged]
        needed = max((early for early in merged_rounds if early < request.oldest), default=-1)
        for round_number in rounds:
            if not needed <= round_number <= merged:
                self._state(round_number).unlink()
        if went_back:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / RESTARTS, str(request.restarts).encode())
        return state

    def committed_state(self, merged: int, first: State) -> State:
        """The state after the round that was merged last, or the first one; no file is touched."""
        return first if merged < 0 else _read(self._state(merged), first)

    def write_state(self, round_number: int, state: State) -> None:
        """Keeps a new state beside those that counted so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self._state(round_number), state)

    def write_once(self, name: str, vector: Tensor) -> None:
        """Keeps a vector that is sent once, in place of an earlier one of that name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._once(name, digest(vector))
        if not path.exists():
            _write(path, {name: vector})
        for other in self.folder.glob(f"{name}-*.safetensors"):
            if other != path:
                other.unlink()

    def read_once(self, name: str, wanted: str, like: Tensor) -> Tensor:
        path = self._once(name, wanted)
        if not path.exists():
            raise FlatfedError(f"{name}: this site does not have it yet; the server must send it")
        vector = _read(path, {name: like})[name]
        if digest(vector) != wanted:
            path.unlink()
            raise FlatfedError(f"{path}: damaged; the server must send it again")
        return vector

    def _rounds(self) -> list[int]:
        names = [path.stem.removeprefix("state-") for path in self.folder.glob("state-*.safetensors")]
        return [int(name) for name in names if name.isdecimal()]

    def _restarts(self) -> int:
        path = self.folder / RESTARTS
        try:
            return int(path.read_bytes()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise FlatfedError(f"{path}: cannot be read ({error}); put it back, or start a new run") from None

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number}.safetensors"

    def _once(self, name: str, wanted: str) -> Path:
        return self.folder / f"{name}-{wanted[:16]}.safetensors"


def _write(path: Path, tensors: State) -> None:
    write_atomically(path, save_tensors({name: value.cpu().contiguous() for name, value in tensors.items()}))


def _read(path: Path, expected: State) -> dict[str, Tensor]:
    """A file's vectors, on the device of the expected ones and of their shapes."""
    try:
        tensors = load_tensors(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise FlatfedError(f"{path}: cannot be read ({error})") from None
    same = tensors.keys() == expected.keys() and all(
        value.shape == expected[name].shape and value.dtype == expected[name].dtype and all_finite(value)
        for name, value in tensors.items()
    )
    if not same:
        raise FlatfedError(f"{path}: it is of another model or algorithm, or damaged")
    return {name: value.to(expected[name].device) for name, value in tensors.items()}
