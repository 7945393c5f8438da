"""GGUF files that llama.cpp split: ``name-00001-of-00003.gguf`` and the others beside it, read as one.

The first part has the model's metadata; every part says which it is (``split.no``) of how many (``split.count``), and
how many tensors they hold together (``split.tensors.count``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.gguf import GGUFFile
from kvjax.errors import WeightsError, quoted

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, given that of one; the name alone for a file that is whole."""
    found = _PART.fullmatch(name)
    count = int(found[3]) if found else 0
    if found is None or not 1 <= int(found[2]) <= count:
        return [name]
    return [f"{found[1]}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


class GGUFParts:
    """The parts of a split GGUF as one checkpoint, like :class:`kvjax.checkpoints.gguf.GGUFFile`.

    Raises WeightsError when a part is missing, is another's, or holds what another holds.
    """

    def __init__(self, paths: list[Path]):
        self.origin = str(paths[0])
        self._parts: list[GGUFFile] = []
        self._where: dict[str, GGUFFile] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        with contextlib.ExitStack() as stack:
            for number, path in enumerate(paths):
                if not path.is_file():
                    raise WeightsError(f"{path.parent} lacks {path.name}, a part of the model of {len(paths)} parts.")
                part = GGUFFile(path)
                stack.callback(part.close)
                self._add(part, number, len(paths))
            self.metadata: Mapping[str, Any] = self._parts[0].metadata
            promised = self.metadata.get("split.tensors.count", len(self._shapes))
            if promised != len(self._shapes):
                raise WeightsError(
                    f"{self.origin} says that its parts hold {quoted(promised)} weights (split.tensors.count); they "
                    f"hold {len(self._shapes):,}."
                )
            self._closing = stack.pop_all()

    def _add(self, part: GGUFFile, number: int, count: int) -> None:
        said = part.metadata.get("split.no"), part.metadata.get("split.count")
        if said != (number, count):
            raise WeightsError(
                f"{part.origin} is by its name part {number + 1} of {count}, and says that it is number "
                f"{quoted(said[0])} of {quoted(said[1])} (split.no, split.count)."
            )
        for name, shape in part.shapes.items():
            if name in self._where:
                first = Path(self._where[name].origin).name
                raise WeightsError(f"{part.origin} sets the weight {quoted(name)}, which {first} sets too.")
            self._where[name], self._shapes[name] = part, shape
        self._parts.append(part)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor of all parts."""
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis of ``name`` as float32."""
        return self._where[name].read(name, start, stop)

    @property
    def formats(self) -> Mapping[str, Format]:
        """See :attr:`GGUFFile.formats`."""
        return {name: form for part in self._parts for name, form in part.formats.items()}

    def numbers(self, name: str, start: int, stop: int) -> Numbers:
        """See :meth:`GGUFFile.numbers`."""
        return self._where[name].numbers(name, start, stop)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._closing.close()


def open_gguf(path: Path) -> GGUFFile | GGUFParts:
    """A GGUF, with all its parts where it is split; ``path`` may be any of them.

    Raises WeightsError for a file that cannot be read and for parts that are missing or do not belong together.
    """
    names = part_names(path.name)
    if len(names) > 1:
        return GGUFParts([path.with_name(name) for name in names])
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return file
    file.close()
    raise WeightsError(
        f"{path} is one of {quoted(count)} parts of a model (split.count); give it the name that llama.cpp gave it, "
        "such as model-00001-of-00003.gguf, beside the others."
    )
