"""Settings that decide where and how a training runs, but none of its numbers."""

from typing import Annotated, Literal

from pydantic import Field

from flatfed.core.settings import CheckedModel
from flatfed.core.types import Count, NonNegative, PositiveShare


class Execution(CheckedModel):
    """How a training is carried out. A run may go on under other ones: its numbers stay the same."""

    engine: Literal["local", "ray"] = "local"
    """Clients are trained on this machine or by a Ray cluster."""
    ray_address: str | None = None
    """The Ray cluster to join, "auto" to look for one, "local" (or none) to start one on this machine."""
    workers: Annotated[Count, Field(le=1024)] | None = None
    """Workers, several in processes of their own; one per core, or one on an accelerator, unless given."""
    device: str = "cpu"
    """Where models are trained: "cpu", "cuda", "cuda:1", "xpu". Other kinds round differently: a run stays on
    its kind."""
    gpu_share: PositiveShare = 1.0
    """The share of a GPU that a worker of a Ray cluster takes, so that several may have one."""
    client_memory: NonNegative = 1024.0
    """Megabytes of client state kept in memory; what is beyond lies in a memory-mapped file."""
    checkpoint_every: Count = 10
    """Rounds between checkpoints; long rounds are saved at least every half minute."""
    training_samples: Count | None = None
    """Samples of clients' own data on which the global model is evaluated, too, for `training_loss` and
    `training_accuracy` in the history; on none unless given."""

    @property
    def client_memory_bytes(self) -> int:
        return int(self.client_memory * 2**20)
