"""Files that are written completely or not at all, and the folders of a user's files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from kvjax.errors import KvjaxError, UsageError


def cache_folder() -> Path:
    """Where downloads and compiled programs are kept: KVJAX_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("KVJAX_CACHE"):
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("kvjax")


def state_folder() -> Path:
    """Where what a user did is kept, such as the chat's history: the user's state folder."""
    import platformdirs

    return platformdirs.user_state_path("kvjax")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all; one sentence when it cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_special(path):  # renaming onto it would put a file in the device's place
            path.write_bytes(data)
            return
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


def check_writable(name: str, path: Path) -> None:
    """Refuse a file that could not be written, before minutes are spent on its content.

    Args:
      name: what names the file, as the sentence says it.

    Raises:
      UsageError: its folder does not exist, or it is a folder itself.
      KvjaxError: nothing can be written there.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise UsageError(f"{name} names a folder, {path}; name a file in it.")
    if _is_special(path):
        return
    if not folder.is_dir():
        raise UsageError(f"{name} names a folder that does not exist: {folder}.")
    try:
        # Permissions do not tell of a read-only filesystem, nor of what root may do; writing does.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise KvjaxError(f"{path} cannot be written: {error.strerror}.") from error


def _is_special(path: Path) -> bool:
    """Whether this is a device or a pipe, such as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


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
