"""Files that are written completely or not at all, and the folders of a user's files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import BinaryIO

from kvjax.errors import KvjaxError, UsageError, cut, quoted

#: The beginning of an address; a drive of Windows has one letter. A path has made one slash of its two.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


#: Bytes of a name, and characters of a path, that systems take.
_NAME, _PATH = 255, 4000

#: Bytes that are read at once.
_PART = 2**20


def reason(error: OSError | ValueError) -> str:
    """Why a path cannot be used, for the end of a sentence; Python's own word for a NUL in it is an error of values."""
    return getattr(error, "strerror", None) or str(error)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, most: int) -> bytes:
    """All bytes of a file; of a device, which has no end, or a file of more than ``most`` bytes a UsageError."""
    with path.open("rb") as file:
        return read_all(file, most, str(path))


def read_all(file: BinaryIO, most: int, name: str) -> bytes:
    """All bytes of an open file of that name; more than ``most`` are a UsageError."""
    parts, count = [], 0
    while part := file.read(_PART):  # asked for ``most`` bytes at once, Python makes room for them all
        parts.append(part)
        count += len(part)
        if count > most:
            raise UsageError(f"{name} has more than {most // 1_000_000} MB; give a smaller file.")
    return b"".join(parts)


def disk_reason(error: Exception) -> str:
    """Why Orbax could not write: it and TensorStore say in a page what the system said in a word."""
    full = "No space left" in str(error) or "Disk quota" in str(error) or "File too large" in str(error)
    return "the disk is full" if full else " ".join(str(error).split())[:160]


def check_local(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse to write to what is no path of this machine: an address (gs://...), text with a NUL, or too long.

    Args:
      name: what names the path, as the sentence says it.

    Raises:
      UsageError: it is one of these.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"{name} is {quoted(path)}; give a path.")
    text = os.fspath(path)
    if _REMOTE.match(text):
        # A path of Python's has lost the second slash.
        written = re.sub(r":/+", "://", text, count=1)
        raise UsageError(f"{name} names {cut(written)}, which is no path of this machine; name one that is.")
    if "\0" in text:
        raise UsageError(f"{name} names a path with a NUL in it, {quoted(text)}; name another.")
    try:
        names = [os.fsencode(part) for part in Path(text).parts]
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} names a path that is not text, {quoted(text)}; name another.") from error
    if len(text) > _PATH or any(len(part) > _NAME for part in names):
        raise UsageError(f"{name} names a path that is too long, {quoted(text)}; name a shorter one.")


def is_file(path: Path) -> bool:
    """Whether there is a file; not at what cannot be a path either."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_file(flag: str, path: Path) -> None:
    """Refuse (UsageError) what is no file."""
    if not is_file(path):
        what = "a folder; give a file" if os.path.isdir(path) else "a file that does not exist"
        raise UsageError(f"{flag} names {what}: {path}.")


def cache_folder() -> Path:
    """The folder of downloads and compiled programs: KVJAX_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("KVJAX_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise UsageError(f"KVJAX_CACHE is {quoted(chosen)}, the home of a user that there is not.") from error
    import platformdirs

    return platformdirs.user_cache_path("kvjax")


def state_folder() -> Path:
    """The folder of a user's state, such as the chat's history."""
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


def check_picture(name: str, path: Path) -> None:
    """Refuse a PNG file that cannot be written (:func:`check_writable`), and a name that says another format."""
    if path.suffix.lower() not in ("", ".png"):
        raise UsageError(f"{name} is {path}; pictures are written as PNG, so give a name that ends in .png.")
    check_writable(name, path)


def check_writable(name: str, path: Path) -> None:
    """Refuse a file that could not be written, before minutes are spent on its content.

    Args:
      name: what names the file, as the sentence says it.

    Raises:
      UsageError: its folder does not exist, or it is a folder itself.
      KvjaxError: nothing can be written there.
    """
    check_local(name, path)
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


def check_folder(name: str, folder: Path) -> None:
    """Refuse a folder that could not be made or written to; it is made when the first file goes there.

    Args:
      name: what names the folder, as the sentence says it.

    Raises:
      UsageError: it is no path of this machine, or a file is in its way.
      KvjaxError: nothing can be written there.
    """
    check_local(name, folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{name} names a folder that cannot be made: {folder} is a file.")
        there = folder.resolve()
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise KvjaxError(f"{name} names a folder that cannot be made: {folder} ({reason(error)}).") from error


def _is_special(path: Path) -> bool:
    """Whether this is a device or a pipe, such as /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder, while others write there: what has just gone counts nothing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, file))
    return total


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
