"""Property tests draw the same examples every time, and a slow machine is no failure."""

import os

import pytest
from hypothesis import settings

settings.register_profile("flatfed", deadline=None, derandomize=True)
settings.load_profile("flatfed")


FIRST = ["test_deployment.py", "test_ray.py", "test_papers.py", "test_compressed.py", "test_contract.py"]
"""What takes longest comes first, beside everything else; the first two mostly wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for while one of them waits."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> None:
    """Nothing of this process has to outlive a power cut; how files are written is tested by other means."""
    os.fsync = lambda handle: None  # type: ignore[assignment]
