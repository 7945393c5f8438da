"""Reading GGUF: the header in one pass, the tensors block by block, dequantised to float32.

The ``gguf`` package owns the table of block formats and the dequantisation of the rarer ones. Its reader makes a
NumPy object of each of the 98,000 strings of a vocabulary (1.5 s for the default model, measured on 2 cores), so the
header is parsed here; and the formats of the default model are written without its intermediate copies.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.gguf_blocks import NUMBERS, format_of
from kvjax.checkpoints.mxfp4 import PAIRS
from kvjax.errors import WeightsError, quoted

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
#: Arrays within one another; the format has none, and no file of a model has two.
_MAX_DEPTH = 4
_HEADER_STEP = 1 << 24


@dataclasses.dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Cursor:
    """Walks over the header's bytes; running off their end is a truncated file."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise EOFError
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of unknown type {kind}")
        if depth == _MAX_DEPTH:
            raise ValueError(f"arrays that are nested more than {_MAX_DEPTH} deep")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return self.strings(count) if inner == _STRING else [self.value(inner, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # Tight on purpose: a vocabulary and its merges are 100,000 strings.
        data, at, out, length = self.data, self.at, [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                out.append(data[start:at].decode("utf-8"))
        except (struct.error, OverflowError):  # a length near 2**63 is no place in any file
            raise EOFError from None
        if at > len(data):
            raise EOFError
        self.at = at
        return out


class GGUFFile:
    """A GGUF file as a checkpoint: ``metadata`` by key, ``shapes`` by tensor name, rows dequantised on request.

    Shapes have the slowest axis first, as everywhere in kvjax; GGUF itself lists the fastest first.

    Raises WeightsError when the file is not GGUF, is truncated, repeats a tensor, or holds a format that cannot be
    read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.origin = str(path)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(open(path, "rb", buffering=0))
                self._size = os.fstat(self._file.fileno()).st_size
                self.metadata, self._tensors, self._start = self._header()
            except OSError as error:
                raise WeightsError(f"{self.origin} cannot be read: {error.strerror or error}.") from error
            self.shapes: Mapping[str, tuple[int, ...]] = {name: found.shape for name, found in self._tensors.items()}
            self._check_extents()
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._closing.close()

    def _header(self) -> tuple[dict[str, Any], dict[str, _Tensor], int]:
        """Parse from a growing prefix of the file, so that its tensors are never read for the header's sake."""
        size, read = _HEADER_STEP, b""
        while True:
            self._file.seek(0)
            read = self._file.read(size)
            try:
                return self._parse(_Cursor(read))
            except EOFError:
                if len(read) == self._size:
                    raise WeightsError(
                        f"{self.origin} is truncated: its header is not complete in {self._size:,} bytes."
                    ) from None
                size *= 4
            except UnicodeDecodeError as error:
                raise WeightsError(f"{self.origin} is corrupt: its header holds text that is not UTF-8.") from error
            except ValueError as error:
                raise WeightsError(f"{self.origin} is corrupt: its header holds {error}.") from error

    def _parse(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Tensor], int]:
        from gguf import GGMLQuantizationType

        if len(cursor.data) < 4 or cursor.take(4) != MAGIC:
            raise WeightsError(f"{self.origin} is not a GGUF file: it does not begin with the letters GGUF.")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise WeightsError(f"{self.origin} is GGUF version {version} (little endian); versions 2 and 3 are read.")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors: dict[str, _Tensor] = {}
        for _ in range(tensor_count):
            name, dims = cursor.string(), cursor.scalar("I")
            if dims > _MAX_DIMS:
                raise ValueError(f"a tensor {quoted(name)} of {dims} dimensions")
            shape = tuple(cursor.scalar("Q") for _ in range(dims))[::-1]
            kind, offset = cursor.scalar("I"), cursor.scalar("Q")
            if name in tensors:
                raise WeightsError(f"{self.origin} sets the weight {quoted(name)} twice.")
            tensors[name] = _Tensor(shape, GGMLQuantizationType(kind), offset)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20:
            raise ValueError(f"an alignment of {quoted(alignment)}")
        return metadata, tensors, -(-cursor.at // alignment) * alignment

    def _check_extents(self) -> None:
        for name, tensor in self._tensors.items():
            row = tensor.shape[-1] if tensor.shape else 1
            block, _ = _block(tensor.kind)
            if row % block:
                raise WeightsError(
                    f"{self.origin} is corrupt: rows of {quoted(name)} have {row} numbers, not a multiple of {block}."
                )
            end = self._start + tensor.offset + _bytes(tensor.kind, math.prod(tensor.shape))
            if end > self._size:
                raise WeightsError(
                    f"{self.origin} is truncated: {quoted(name)} ends at byte {end:,} of a file of {self._size:,} "
                    "bytes."
                )

    @property
    def formats(self) -> Mapping[str, Format]:
        """How the numbers of each quantised tensor are kept."""
        return {name: form for name, tensor in self._tensors.items() if (form := format_of(tensor.kind)) is not None}

    def numbers(self, name: str, start: int, stop: int) -> Numbers:
        """Elements ``start:stop`` of the first axis of ``name``, of a format of groups, as the file has them."""
        shape, raw = self._raw(name, start, stop)
        whole, *beside = NUMBERS[self._tensors[name].kind.name](raw)
        groups = (*shape[:-1], -1)
        scale, minimum = (None if x is None else x.reshape(groups) for x in beside)
        assert scale is not None
        return Numbers(whole.reshape(shape), scale, minimum)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis of ``name`` as float32."""
        shape, raw = self._raw(name, start, stop)
        return dequantize(raw, self._tensors[name].kind, name).reshape(shape)

    def _raw(self, name: str, start: int, stop: int) -> tuple[tuple[int, ...], np.ndarray]:
        """The shape of some elements of the first axis, and their bytes."""
        tensor = self._tensors[name]
        inner = math.prod(tensor.shape[1:])
        begin, size = _bytes(tensor.kind, start * inner), _bytes(tensor.kind, (stop - start) * inner)
        with self._lock:
            self._file.seek(self._start + tensor.offset + begin)
            raw = self._file.read(size)
        if len(raw) != size:
            raise WeightsError(f"{self.origin} became shorter while it was read: {quoted(name)} is not complete.")
        return (stop - start, *tensor.shape[1:]), np.frombuffer(raw, np.uint8)


def _block(kind: GGMLQuantizationType) -> tuple[int, int]:
    """(numbers, bytes) of one block of a format."""
    from gguf import GGML_QUANT_SIZES

    return GGML_QUANT_SIZES[kind]


def _bytes(kind: GGMLQuantizationType, numbers: int) -> int:
    block, size = _block(kind)
    return numbers // block * size


def _q4_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view([("d", "<f2"), ("q", "u1", 16)])
    out = _nibbles(blocks["q"])
    out -= np.float32(8)
    out *= blocks["d"].astype(np.float32)[:, None]
    return out


def _q4_1(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    out = _nibbles(blocks["q"])
    out *= blocks["d"].astype(np.float32)[:, None]
    out += blocks["m"].astype(np.float32)[:, None]
    return out


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes to [blocks, 32] float32: low halves first, then high halves."""
    out = np.empty((len(packed), 32), np.float32)
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe")
    return out


def _q8_0(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view([("d", "<f2"), ("q", "i1", 32)])
    return np.multiply(blocks["q"], blocks["d"].astype(np.float32)[:, None], dtype=np.float32)


# As ggml has them: whole numbers, no negative zero, and half of the scale, whose largest is no exception.
_DOUBLED, _HALVED = 2 * PAIRS + np.float32(0), np.ldexp(np.float32(1), np.arange(-128, 128))


def _mxfp4(raw: np.ndarray) -> np.ndarray:
    blocks = raw.view([("e", "u1"), ("q", "u1", 16)])
    out = np.empty((len(blocks), 2, 16), np.float32)
    # Low halves are the first numbers of a block here, and not every other one as in safetensors.
    np.take(_DOUBLED[:, 0], blocks["q"], out=out[:, 0])
    np.take(_DOUBLED[:, 1], blocks["q"], out=out[:, 1])
    out *= _HALVED[blocks["e"]][:, None, None]
    return out


_FAST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
}


def dequantize(raw: np.ndarray, kind: GGMLQuantizationType, name: str = "a tensor") -> np.ndarray:
    """Whole blocks of bytes (uint8, one axis) to float32, bit for bit as ``gguf.dequantize`` gives them.

    Raises WeightsError for a format that package cannot dequantise, with ``name`` in the sentence.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is said by the loader
            if kind.name in _FAST:
                return _FAST[kind.name](raw).reshape(-1)
            import gguf

            # One row: the package works on 16 rows at a time, and on single blocks that would be slow.
            return gguf.dequantize(raw.reshape(1, -1), kind).reshape(-1)
    except NotImplementedError as error:
        raise WeightsError(f"The weight {quoted(name)} is stored as {kind.name}, which cannot be read yet.") from error
