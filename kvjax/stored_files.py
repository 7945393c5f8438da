"""Files of a folder with their sizes and digests, taken when it was whole and compared before anything is read."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from kvjax.documents import NotADocument
from kvjax.errors import quoted
from kvjax.files import file_digest


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """The size of a file in bytes, and its SHA-256; None where something else holds its checksum."""

    bytes: int
    sha256: str | None


def stored(path: Path) -> StoredFile:
    """The size and the digest of a file that is there."""
    return StoredFile(path.stat().st_size, file_digest(path))


def check_names(files: Mapping[str, StoredFile]) -> None:
    """Refuse (NotADocument) paths that leave the folder, and sizes that no file has."""
    for name, file in files.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or not parts.parts or {"..", "\0"} & {*parts.parts, *name} or file.bytes < 0:
            raise NotADocument(f"it contradicts itself about {quoted(name)}")


def check_stored(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Refuse (NotADocument) a folder that lacks a file, or has one of another size, or a changed one with a digest."""
    for name, file in files.items():
        path = folder / name
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                raise NotADocument(f"{name} is no file")
            size = found.st_size
            changed = file.sha256 is not None and size == file.bytes and file_digest(path) != file.sha256
        except OSError as error:
            raise NotADocument(f"{name} cannot be read ({error.strerror})") from error
        if size != file.bytes:
            raise NotADocument(f"{name} has {size:,} bytes instead of {file.bytes:,}")
        if changed:
            raise NotADocument(f"{name} was changed")
