"""The seal of a save: the size and the digest of each of its files, checked before Orbax opens any.

Orbax and TensorStore say of a broken file in pages what one sentence says. The seal is written once the save is whole,
which it is without one too: a crash in between, and version 0.1, leave none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, quoted
from kvjax.files import file_digest, write_atomically

#: The file of a save that holds its seal.
SEAL = "kvjax-seal.json"
#: The folder of a save that the seal is of: the description beside it has its own digest.
_STATE = "state"


@dataclasses.dataclass(frozen=True)
class SealedFile:
    """The size of a file, and its SHA-256."""

    bytes: int
    sha256: str


def seal(item: Path) -> None:
    """Write the seal of a save that is whole."""
    files = sorted(path for path in (item / _STATE).rglob("*") if path.is_file())
    found = {str(path.relative_to(item).as_posix()): _sealed(path) for path in files}
    # Without a seal the save is as whole as with one: a load then finds damage later, and says it at length.
    with contextlib.suppress(KvjaxError):
        write_atomically(item / SEAL, json.dumps({name: dataclasses.asdict(file) for name, file in found.items()}))


def check_seal(item: Path) -> None:
    """Refuse (NotADocument) a save of which a file is missing or not what it was; one without a seal passes."""
    try:
        content = (item / SEAL).read_bytes()
    except FileNotFoundError:
        return
    try:
        files: dict[str, SealedFile] = validated(dict[str, SealedFile], parse_json(content))
    except NotADocument as error:
        raise NotADocument(f"its {SEAL} is not what was saved: {error}") from error
    for name, sealed in files.items():
        path = item / name
        if ".." in Path(name).parts or not path.is_relative_to(item):
            raise NotADocument(f"{SEAL} names {quoted(name)}")
        if not path.is_file():
            raise NotADocument(f"{name} is missing")
        size = path.stat().st_size
        if size != sealed.bytes:
            raise NotADocument(f"{name} has {size:,} bytes instead of {sealed.bytes:,}")
        if _sealed(path) != sealed:
            raise NotADocument(f"{name} was changed")


def _sealed(path: Path) -> SealedFile:
    return SealedFile(path.stat().st_size, file_digest(path))


__all__ = ["SEAL", "check_seal", "seal"]
