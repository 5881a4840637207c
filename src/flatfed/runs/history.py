"""A run's history.jsonl: one line per round, and the checksum of the lines that a checkpoint counts on."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flatfed.runs.files import RunFolderError, read_bytes, sha256, write_atomically
from flatfed.training.loop import History


class WrittenHistory(BaseModel):
    """The beginning of the file that belongs to a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: int = 0
    sha256: str = sha256(b"")


class HistoryFile:
    """Lines are appended; their checksum grows with them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._bytes = 0

    def read(self) -> History:
        """The lines of finished rounds, without a last one that was cut off."""
        return parsed(read_bytes(self.path)) if self.path.exists() else []

    def checked(self, written: WrittenHistory) -> bytes:
        """The lines that belong to a checkpoint."""
        # A run begins with its manifest, before there is a history.
        content = read_bytes(self.path)[: written.bytes] if written.bytes else b""
        if len(content) < written.bytes or sha256(content) != written.sha256:
            raise RunFolderError(
                f"{self.path}: damaged or edited, its checksum is not the one in the manifest; restore it or "
                "choose another folder"
            )
        return content

    def restart(self, content: bytes) -> None:
        """Goes on after these lines."""
        write_atomically(self.path, content)
        self._digest, self._bytes = hashlib.sha256(content), len(content)

    def append(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        # Not created: a file that has vanished would lack its beginning.
        with self.path.open("r+b") as file:
            file.seek(self._bytes)
            file.write(line)
        self._digest.update(line)
        self._bytes += len(line)

    @property
    def written(self) -> WrittenHistory:
        """The lines that there are now."""
        return WrittenHistory(bytes=self._bytes, sha256=self._digest.hexdigest())

    def sync(self) -> None:
        """Returns once they are safely on disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


def parsed(content: bytes) -> History:
    """The records of consecutive rounds, counted from 1, up to a line that is none."""
    history: History = []
    for line in content.decode(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        number = record.get("round") if isinstance(record, dict) else None
        if isinstance(number, bool) or number != len(history) + 1:
            break
        history.append(record)
    return history
