"""Where a run was made: versions, machine, commit."""

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("flatfed", "torch", "numpy", "pydantic", "safetensors", "scikit-learn")


def environment(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), **_package_versions()},
        "commit": source_commit(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "engine": dict(engine),
        "command": sys.argv,
    }


@functools.cache
def _package_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


@functools.cache
def source_commit() -> str | None:
    """The commit of the flatfed source tree that is running, if it is one, as it first was."""
    file = Path(__file__)

    def git(*arguments: str) -> str:
        words = ["git", *arguments]
        done = subprocess.run(words, cwd=file.parent, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return None
