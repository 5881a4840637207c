"""Callbacks that send a run's numbers elsewhere while it goes on."""

import importlib
from pathlib import Path
from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.training.loop import Progress


class TensorBoard:
    """Writes every round's numbers for TensorBoard: test_accuracy as test/accuracy and so on.

    A resumed run goes on in the same folder, and what was written of rounds that are run again is dropped.
    Numbers of other callbacks are included if those come earlier in the list.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            self._make_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise FlatfedError("tensorboard: not installed; pip install 'flatfed[tensorboard]'") from None
        self.folder = Path(folder)
        self._writer: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._writer is None:
            self._writer = self._make_writer(str(self.folder), purge_step=progress.round)
        for name, value in progress.record.items():
            group, _, rest = name.partition("_")
            # TensorBoard groups what belongs together: test_accuracy becomes test/accuracy.
            tag = f"{group}/{rest}" if rest and group in {"test", "train", "bytes"} else name
            if name != "round":
                self._writer.add_scalar(tag, value, progress.round)
        # A killed run has everything up to its last round.
        self._writer.flush()
