"""Checksums of a save: the size and the digest of each of its files, checked before Orbax opens any.

Orbax and TensorStore say of a broken file in pages what one sentence says. The checksums are written once the save is
whole, which it is without them too: a crash in between, and version 0.1, leave none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError
from kvjax.files import write_atomically
from kvjax.stored_files import StoredFile, check_names, check_stored, stored

#: The file of a save that holds its checksums.
CHECKSUMS = "kvjax-checksums.json"
#: The folder of a save that they are of: the description beside it has its own digest.
_STATE = "state"


def write_checksums(item: Path) -> None:
    """Write the checksums of a save that is whole."""
    files = sorted(path for path in (item / _STATE).rglob("*") if path.is_file())
    found = {path.relative_to(item).as_posix(): dataclasses.asdict(stored(path)) for path in files}
    # Without them the save is as whole as with them: a load then finds damage later, and says it at length.
    with contextlib.suppress(KvjaxError):
        write_atomically(item / CHECKSUMS, json.dumps(found))


def check_files(item: Path) -> None:
    """Refuse (NotADocument) a save of which a file is missing or not what it was; one without checksums passes."""
    try:
        content = (item / CHECKSUMS).read_bytes()
    except FileNotFoundError:
        return
    try:
        files: dict[str, StoredFile] = validated(dict[str, StoredFile], parse_json(content))
        check_names(files)
    except NotADocument as error:
        raise NotADocument(f"its {CHECKSUMS} is not what was saved: {error}") from error
    check_stored(item, files)
