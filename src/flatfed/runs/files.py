"""Writing files so that they are there as a whole or not at all, and reading them back."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import save as save_tensors
from torch import nn

from flatfed.core.errors import FlatfedError


def write_atomically(path: Path, content: bytes) -> None:
    """Either the whole content is at `path`, safely on disk, or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FlatfedError(f"{path}: cannot be read as JSON ({error}); is this a run folder?") from None


def save_module(module: nn.Module, path: Path) -> None:
    """A module's parameters and buffers by name; tensors that are shared are written once for each name."""
    tensors = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    write_atomically(path, save_tensors({name: value.contiguous() for name, value in tensors.items()}))
