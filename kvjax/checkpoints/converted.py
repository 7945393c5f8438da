"""Converted models: folders that hold a model in the form in which kvjax multiplies it, written by ``kvjax convert``.

``weights/`` is a checkpoint of Orbax, ``tokenizer.json`` and ``chat_template.jinja`` are the tokenizer, and
``kvjax.json``, which this module reads, says everything else: the configuration, the size and the digest of every file,
and a CRC-32 of every chunk of every array. It is small, and all that a plan reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.safetensors import read_json
from kvjax.documents import NotADocument, validated
from kvjax.errors import WeightsError, quoted
from kvjax.model.config import ModelConfig
from kvjax.stored_files import StoredFile, check_names, check_stored

#: Of the form that is written. A folder of a later version is refused.
VERSION = 1
KIND = "kvjax model"
DESCRIPTION, TOKENIZER, TEMPLATE, WEIGHTS = "kvjax.json", "tokenizer.json", "chat_template.jinja", "weights"
#: What Orbax calls the parameters in its checkpoint.
PARAMETERS = "parameters"


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of the checkpoint.

    Attributes:
      shape: its shape. dtype: its dtype's name.
      chunk: shape of the chunks it is stored in; those at its ends go beyond it.
      crc32: of each chunk's file, the last axis fastest.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    crc32: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Description:
    """A converted model without its numbers: the content of ``kvjax.json``.

    Attributes:
      kind, version, kvjax: what wrote it.
      name: the model it was converted from.
      config: its shape; ``config.weights`` says how its matrices are stored.
      dtype: of the parameters that are floats.
      stop_token_ids: ids that end an answer.
      special_tokens: tokens by role, for the chat template.
      files: every other file of the folder, by its path there.
      arrays: by the path of the parameter.
    """

    kind: str
    version: int
    kvjax: str
    name: str
    config: ModelConfig
    dtype: str
    stop_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    files: dict[str, StoredFile]
    arrays: dict[str, StoredArray]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every array."""
        return {name: array.shape for name, array in self.arrays.items()}

    def text(self) -> str:
        """The content of the file, with a digest of itself."""
        content = dataclasses.asdict(self)
        return json.dumps(content | {"sha256": _digest(content)}, indent=1)


def is_converted(folder: Path) -> bool:
    """Whether a folder is a converted model, even one that has lost its description."""
    return (folder / DESCRIPTION).is_file() or (folder / WEIGHTS / "_CHECKPOINT_METADATA").is_file()


def damaged(folder: Path, why: str) -> WeightsError:
    """The refusal of a folder that is not as it was written."""
    return WeightsError(f"The converted model at {folder} is damaged: {why}; convert the original again.")


def read_description(folder: Path) -> Description:
    """The description of a converted model; nothing but ``kvjax.json`` is read.

    Raises:
      WeightsError: the file is missing, changed, of a later version, or describes what cannot be.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise damaged(folder, f"{DESCRIPTION} is missing")
    found = read_json(path)
    if found.get("kind") != KIND:
        raise WeightsError(f"{path} does not describe a converted model: its kind is {quoted(found.get('kind'))}.")
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise WeightsError(
            f"{folder} was converted by kvjax {found.get('kvjax')}, in version {version} of the form; this one reads "
            f"up to version {VERSION}."
        )
    digest = found.pop("sha256", None)
    if digest != _digest(found):
        raise damaged(folder, f"{DESCRIPTION} was changed")
    try:
        description = validated(Description, found)
    except NotADocument as error:
        raise damaged(folder, f"{DESCRIPTION} describes a model that cannot be ({error})") from error
    _check_arrays(folder, description)
    return description


def check_files(folder: Path, description: Description) -> None:
    """Refuse a folder that lacks a file, or has one of another size, or a changed one that has a digest."""
    try:
        check_stored(folder, description.files)
    except NotADocument as error:
        raise damaged(folder, str(error)) from error


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_arrays(folder: Path, description: Description) -> None:
    """A description that contradicts itself is refused before memory is taken for what it describes."""

    def contradiction(name: str) -> WeightsError:
        return damaged(folder, f"{DESCRIPTION} contradicts itself about {quoted(name)}")

    try:
        check_names(description.files)
    except NotADocument as error:
        raise damaged(folder, f"{DESCRIPTION}: {error}") from error
    if TOKENIZER not in description.files:
        raise contradiction(TOKENIZER)
    if not all(0 <= index < description.config.vocab_size for index in description.stop_token_ids):
        raise contradiction("stop_token_ids")
    total = 0
    for name, array in description.arrays.items():
        try:
            total += array.nbytes
            whole = all(1 <= step <= size for size, step in zip(array.shape, array.chunk, strict=True))
            if not (array.shape and whole and math.prod(array.grid) == len(array.crc32)):
                raise contradiction(name)
        except (TypeError, ValueError) as error:  # axes that differ, or no dtype
            raise contradiction(name) from error
    # Arrays are not compressed, so their files are at least as large as they are.
    if total > sum(file.bytes for name, file in description.files.items() if name.startswith(f"{WEIGHTS}/")):
        raise contradiction(WEIGHTS)
