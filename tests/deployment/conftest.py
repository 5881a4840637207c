import importlib.util
import logging

import pytest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    if importlib.util.find_spec("flwr") is not None:
        monkeypatch.setattr("flatfed.deployment.nodes.POLL", 0.001)
        # So that caplog hears what Flower's logger says.
        monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
