"""Generated data in place of the real ones."""

from __future__ import annotations

import pytest
from data import fake

from flatfed.training import config as config_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Generated data where loaders look for them; the rest of the tests must not see them."""
    root = tmp_path_factory.mktemp("papers")
    fake.write_everything(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATFED_DATA", str(root / "data"))
        config_module._loaded.cache_clear()
        yield root
    config_module._loaded.cache_clear()
