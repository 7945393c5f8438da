"""Kernel sizes that ``tune`` measured on a user's hardware, looked up while a kernel is traced.

A file names them per device kind and problem; it is read from ``PALLAS_KERNELS_TUNED``. What
it does not name is chosen by each kernel's own rule.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import jax

from pallas_kernels import dispatch

#: Names the file in the environment.
VARIABLE = "PALLAS_KERNELS_TUNED"

#: From so many on, a block of 2,048 keys on the diagonal is at most an eighth of what a chunk's last queries see.
MANY_KEYS = 8192
#: Of queries: so many and more.
LARGEST_CLASS = 512

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Key:
    """What sizes were measured for; everything the kernels' rules look at, but the number of rows."""

    device: str
    head_dim: int
    group: int
    dtype: str
    page_size: int

    @classmethod
    def of(cls, problem: Any) -> Key:
        """Of a problem, on the device it is traced for."""
        _, _, group, head_dim = problem.q.shape
        return cls(dispatch.device_kind(), head_dim, group, str(problem.pages.dtype), problem.pages.shape[2])

    def __str__(self) -> str:
        return f"{self.device} | D={self.head_dim} G={self.group} {self.dtype} R={self.page_size}"


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """What sizes of kernels that read a chunk of queries were measured for; neither the number of rows nor of heads.

    Attributes:
      queries: the class of their number, see :func:`query_class`.
      many: whether the keys are so many that blocks on the diagonal are few.
    """

    device: str
    head_dim: int
    group: int
    dtype: str
    queries: int
    many: bool

    @classmethod
    def of(cls, problem: Any) -> ChunkKey:
        """Of a problem, on the device it is traced for."""
        _, _, group, count, head_dim = problem.q.shape
        many = problem.k.shape[2] >= MANY_KEYS
        return cls(dispatch.device_kind(), head_dim, group, str(problem.k.dtype), query_class(count), many)

    def __str__(self) -> str:
        queries = f"N={self.queries}" if self.queries < LARGEST_CLASS else f"N>={self.queries}"
        keys = f"T>={MANY_KEYS}" if self.many else f"T<{MANY_KEYS}"
        return f"{self.device} | D={self.head_dim} G={self.group} {self.dtype} {queries} {keys}"


def query_class(count: int) -> int:
    """A window's queries rounded up to 16, 32 or 64; more of them down to 128, 256 or 512.

    So a block of queries that was measured fits every problem of its class, and the kernels' rules, which take windows
    of up to 64 queries apart, do not differ within one by more than the power of two.
    """
    if count <= 64:
        return max(16, 1 << (count - 1).bit_length())
    return min(max(128, 1 << (count.bit_length() - 1)), LARGEST_CLASS)


def key_of(problem: Any) -> Key | ChunkKey:
    """Of one token a row on pages, or of a chunk of queries."""
    return Key.of(problem) if hasattr(problem, "pages") else ChunkKey.of(problem)


def config(kernel: str, problem: Any, kind: type[Config]) -> Config | None:
    """Sizes measured for this kernel and problem, or ``None``.

    They are of the problem's class. Where it has fewer queries or keys than a block of theirs, or keys that are no
    whole blocks, the kernel takes smaller blocks, as it does of its own sizes.

    Raises:
      ValueError: the file is not one that ``tune`` wrote.
    """
    if not os.environ.get(VARIABLE):
        return None
    path = Path(os.environ[VARIABLE])
    sizes = read(path).get(kernel, {}).get(str(key_of(problem)))
    try:
        return None if sizes is None else kind(**sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: sizes of {kernel} are {sizes}; tune again with this version.") from error


def read(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """What a file holds: by kernel and key, sizes.

    Raises:
      ValueError: there is none, or it is not one that :func:`write` wrote.
    """
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no sizes of kernels: {error}; tune into another file.") from error


@functools.lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> dict[str, dict[str, dict[str, int]]]:
    del modified
    held = json.loads(path.read_text())
    kernels = held.get("kernels") if isinstance(held, dict) else None
    if not isinstance(kernels, dict):
        raise ValueError('it has no "kernels"')
    for kernel, by_key in kernels.items():
        if not isinstance(by_key, dict) or not all(isinstance(sizes, dict) for sizes in by_key.values()):
            raise ValueError(f"{kernel!r} names no sizes")
    return kernels


def write(path: Path, measured: dict[str, dict[str, dict[str, int]]]) -> None:
    """Add to a file, or begin one; what it already holds for other problems stays. It is there whole or not at all."""
    kernels = dict(read(path)) if path.exists() else {}
    for kernel, sizes in measured.items():
        kernels[kernel] = {**kernels.get(kernel, {}), **sizes}
    text = json.dumps({"jax": jax.__version__, "kernels": kernels}, indent=2, sort_keys=True) + "\n"
    if path.exists() and not path.is_file():  # /dev/stdout, say
        path.write_text(text)
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        temporary = Path(file.name)
        file.write(text)
    temporary.chmod(0o644)
    temporary.replace(path)
