"""Settings that decide where and how a training runs, but none of its numbers."""

from typing import Annotated, Literal

from pydantic import Field

from flatfed.core.settings import CheckedModel
from flatfed.core.types import Count, NonNegative


class Execution(CheckedModel):
    """How a training is carried out. A run may go on under other ones: its numbers stay the same."""

    engine: Literal["local", "ray"] = "local"
    """Clients are trained on this machine or by a Ray cluster."""
    ray_address: str | None = None
    """The Ray cluster to join, "auto" to look for one, "local" (or none) to start one on this machine."""
    workers: Annotated[Count, Field(le=1024)] | None = None
    """Workers, several in processes of their own; one per core unless given."""
    device: str = "cpu"
    """Where models are trained. Other kinds of devices round differently: a run stays on its kind."""
    client_memory: NonNegative = 1024.0
    """Megabytes of client state kept in memory; what is beyond lies in a memory-mapped file."""
    checkpoint_every: Count = 10
    """Rounds between checkpoints; long rounds are saved at least every half minute."""

    @property
    def client_memory_bytes(self) -> int:
        return int(self.client_memory * 2**20)
