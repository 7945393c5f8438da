"""Lookup of kernel block sizes that ``tune`` measured on a user's hardware, while a kernel is traced.

The file that ``PALLAS_KERNELS_TUNED`` names holds them per device kind and problem. For other problems each kernel has
a default rule.
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

#: Environment variable with the file's path.
VARIABLE = "PALLAS_KERNELS_TUNED"

#: From this many keys on, a block of 2,048 keys on the diagonal is at most an eighth of what the last queries read.
MANY_KEYS = 8192
#: The class of this many queries and more.
LARGEST_CLASS = 512

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Key:
    """Problem class of decode sizes: everything the kernels' rules depend on except the number of rows."""

    device: str
    head_dim: int
    group: int
    dtype: str
    page_size: int

    @classmethod
    def of(cls, problem: Any) -> Key:
        """The key of a problem, on the device it is traced for."""
        _, _, group, head_dim = problem.q.shape
        return cls(dispatch.device_kind(), head_dim, group, str(problem.pages.dtype), problem.pages.shape[2])

    def __str__(self) -> str:
        return f"{self.device} | D={self.head_dim} G={self.group} {self.dtype} R={self.page_size}"


@dataclasses.dataclass(frozen=True)
class ChunkKey:
    """Problem class of sizes for chunks of queries; the numbers of rows and heads do not matter.

    Attributes:
      queries: class of the number of queries, see :func:`query_class`.
      many: whether there are at least ``MANY_KEYS`` keys.
    """

    device: str
    head_dim: int
    group: int
    dtype: str
    queries: int
    many: bool

    @classmethod
    def of(cls, problem: Any) -> ChunkKey:
        """The key of a problem, on the device it is traced for."""
        _, _, group, count, head_dim = problem.q.shape
        many = problem.k.shape[2] >= MANY_KEYS
        return cls(dispatch.device_kind(), head_dim, group, str(problem.k.dtype), query_class(count), many)

    def __str__(self) -> str:
        queries = f"N={self.queries}" if self.queries < LARGEST_CLASS else f"N>={self.queries}"
        keys = f"T>={MANY_KEYS}" if self.many else f"T<{MANY_KEYS}"
        return f"{self.device} | D={self.head_dim} G={self.group} {self.dtype} {queries} {keys}"


def query_class(count: int) -> int:
    """Class of a number of queries: up to 64 rounded up to 16, 32 or 64; more rounded down to 128, 256 or 512.

    A block of queries that was measured then fits every problem of its class, and the kernels' default rules, which
    treat windows of up to 64 queries separately, differ within a class by at most a power of two.
    """
    if count <= 64:
        return max(16, 1 << (count - 1).bit_length())
    return min(max(128, 1 << (count.bit_length() - 1)), LARGEST_CLASS)


def key_of(problem: Any) -> Key | ChunkKey:
    """The key of a decode problem (one token per row on pages) or of a chunk of queries."""
    return Key.of(problem) if hasattr(problem, "pages") else ChunkKey.of(problem)


def config(kernel: str, problem: Any, kind: type[Config]) -> Config | None:
    """Sizes measured for this kernel and problem, or ``None``.

    They were measured for the problem's class. Where it has fewer queries or keys than a block, or keys that are not
    whole blocks, the kernel uses smaller blocks, as it does with its default sizes.

    Raises:
      ValueError: ``tune`` did not write this file.
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
    """Sizes in a file, by kernel and key.

    Raises:
      ValueError: there is no such file, or :func:`write` did not write it.
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
    """Add sizes to a file, which may be new; its entries for other problems stay. The file is replaced atomically."""
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
