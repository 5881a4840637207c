"""Callbacks that send a run's numbers elsewhere while it goes on."""

import importlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flatfed.core.errors import USER_ERRORS, FlatfedError, FlatfedWarning, first_line, shown
from flatfed.training.loop import Callback, Progress


@runtime_checkable
class EndListener(Protocol):
    """A callback that also wants to know when its run has ended."""

    def run_ended(self, error: BaseException | None) -> None:
        """`error` is what ended the run before its last round."""
        ...


@contextmanager
def announced_end(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Tells every callback that wants to know, even if another one fails at that.

    What ended the run is raised then, or else what a callback raised, when all is done.
    """
    ended: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended = error
    listeners: list[Any] = [one for one in callbacks if isinstance(one, EndListener)]
    problems = [problem for listener in listeners if (problem := _announced(listener, ended)) is not None]
    if ended is not None:
        for problem in problems:
            warnings.warn(
                f"callbacks: {first_line(problem)} at the end of the run", FlatfedWarning, stacklevel=4
            )
        raise ended
    if problems:
        raise problems[0]


def _announced(listener: EndListener, ended: BaseException | None) -> BaseException | None:
    try:
        listener.run_ended(ended)
    except USER_ERRORS as problem:
        return problem
    return None


def _numbers(progress: Progress) -> dict[str, float]:
    return {name: float(value) for name, value in progress.record.items() if name != "round"}


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


class Wandb:
    """Sends every round's numbers to Weights & Biases; the options are those of wandb.init.

    A resumed run goes on in the same run there if it is given an `id`.
    """

    def __init__(self, project: str, **options: Any) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError:
            raise FlatfedError("wandb: not installed; pip install 'flatfed[wandb]'") from None
        self._options = {"project": project, "resume": "allow", **options}
        self._run: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._run is None:
            self._run = self._wandb.init(**self._options)
        self._run.log(_numbers(progress), step=progress.round)

    def run_ended(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None


class MLflow:
    """Sends every round's numbers, and some parameters, to an MLflow experiment.

    `tracking_uri` is a server or database, by default the one of MLflow's own settings. Given the `run_id` of
    an earlier part of a resumed run, it goes on there after the last round that was sent.
    """

    def __init__(
        self,
        experiment: str,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        try:
            self._mlflow = importlib.import_module("mlflow")
        except ImportError:
            raise FlatfedError("mlflow: not installed; pip install 'flatfed[mlflow]'") from None
        if not isinstance(experiment, str) or not experiment:
            raise FlatfedError(f"experiment = {shown(experiment)}: give the experiment a name")
        self.experiment, self.run_name, self.run_id = experiment, run_name, run_id
        self._tracking_uri, self._params = tracking_uri, dict(params or {})
        self._client: Any = None
        self._sent = 0

    def __call__(self, progress: Progress) -> None:
        if self._client is None:
            self._begin()
        if progress.round <= self._sent:
            return
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, now, progress.round) for name, value in _numbers(progress).items()]
        self._client.log_batch(self.run_id, metrics=metrics)
        self._sent = progress.round

    def _begin(self) -> None:
        self._client = self._mlflow.MlflowClient(self._tracking_uri)
        if self.run_id is None:
            known = self._client.get_experiment_by_name(self.experiment)
            number = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
            self.run_id = self._client.create_run(number, run_name=self.run_name).info.run_id
            for name, value in self._params.items():
                self._client.log_param(self.run_id, name, value)
        else:
            steps = [metric.step for metric in self._client.get_metric_history(self.run_id, "train_loss")]
            self._sent = max(steps, default=0)

    def run_ended(self, error: BaseException | None) -> None:
        if self._client is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            status = "FINISHED" if error is None else "KILLED" if interrupted else "FAILED"
            self._client.set_terminated(self.run_id, status)
            self._client = None
