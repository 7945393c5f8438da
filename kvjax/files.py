"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kvjax.errors import KvjaxError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; one sentence when it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o644)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        sync_folder(path.parent)
    except OSError as error:
        raise KvjaxError(f"{path} cannot be written: {error.strerror}.") from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power, on systems and filesystems that can do it."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network filesystems refuse this for folders; the file itself is written and renamed all the same.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
