"""Whether the machine is free to be measured, and how much of it was lent to others meanwhile."""

import os
import sys
import time
from pathlib import Path

BUSY = 0.1
"""The share of a core that may be in use before a measurement begins."""


def processor_seconds() -> dict[str, float]:
    """Seconds of all cores since the machine started, by what they were spent on (Linux)."""
    line = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, idle, waiting, interrupt, soft, steal = (int(value) for value in line[:8])
    ticks = {"busy": user + nice + system + interrupt + soft, "idle": idle + waiting, "steal": steal}
    return {name: value / os.sysconf("SC_CLK_TCK") for name, value in ticks.items()}


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


class StealTime:
    """The share of the machine's time that its host gave to others since this object was made."""

    def __init__(self) -> None:
        self._before = processor_seconds()

    def share(self) -> float:
        now = processor_seconds()
        spent = {name: now[name] - before for name, before in self._before.items()}
        return spent["steal"] / max(sum(spent.values()), 1e-9)


def refuse_unless_idle(seconds: float = 2.0) -> None:
    """Ends the program if other work uses more than a tenth of a core."""
    before = processor_seconds()
    time.sleep(seconds)
    cores = (processor_seconds()["busy"] - before["busy"]) / seconds
    if cores > BUSY:
        sys.exit(f"other programs use {cores:.2f} cores; stop them, or measure anyway with --busy")
