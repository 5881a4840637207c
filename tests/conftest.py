"""Property tests draw the same examples every time, and a slow machine is no failure."""

import pytest
from hypothesis import settings

settings.register_profile("flatfed", deadline=None, derandomize=True)
settings.load_profile("flatfed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The deployment, whose processes mostly wait for each other, comes first, beside everything else."""
    items.sort(key=lambda item: item.path.name != "test_deployment.py")
