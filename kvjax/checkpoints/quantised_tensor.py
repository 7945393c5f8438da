"""Quantised tensors of safetensors: a matrix that several stored tensors stand for, and the protocol of a method."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import numpy as np

from kvjax.checkpoints.checkpoint import Format, Numbers
from kvjax.checkpoints.stored import Stored
from kvjax.errors import WeightsError, quoted
from kvjax.model.group_quantised import GroupFormat

#: Sizes of groups that a product can have, the largest first.
_GROUPS = (128, 64, 32, 16)
#: Rows ``start:stop`` of an array that is stored in some other way.
Rows = Callable[[int, int], np.ndarray]


class Tensor(Protocol):
    """A tensor of a model that stored ones stand for.

    Attributes:
      shape: as the model's configuration has it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> Format:
        """How its numbers are kept."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements ``start:stop`` of the first axis, float32."""
        ...

    def numbers(self, start: int, stop: int) -> Numbers:
        """The same as they are stored."""
        ...


class Method(Protocol):
    """A way to quantise the tensors of a checkpoint.

    Attributes:
      weight: the end of the name of a tensor that it quantises; those of what stands for it come in its place.
    """

    @property
    def weight(self) -> str: ...

    def end_of(self, stored: Stored) -> str | None:
        """The end of a stored tensor's name by which it is a part of a quantised one; None where it is a tensor."""
        ...

    def idle(self, name: str) -> bool:
        """Whether a stored tensor is of what kvjax does otherwise: scales of activations, or of a cache."""
        ...

    def join(self, origin: str, stem: str, parts: Mapping[str, Stored]) -> Tensor:
        """The tensor that parts, by the ends of their names, stand for; WeightsError where they do not fit.

        Args:
          origin: the folder, for messages.
          stem: the name of the tensor and of its parts, without their ends.
          parts: what is there of it.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix [N outputs, K inputs] of whole numbers q with scales s and zero points z: ``s * (q - z)``.

    Attributes:
      shape: [N, K].
      bits: of a number, 4 or 8.
      group: inputs that share a scale; the last group may have fewer.
      whole: rows of q, int8 [n, K], of 4 bits from -8 to 7.
      scale: rows of s, floats [n, ceil(K / group)], in the dtype that they are stored in.
      zero: rows of z in the order of the scales, whole numbers that count as q does; None where all are 0.
      group_of: [K] the group of each input, where groups are not of inputs that follow each other.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    whole: Rows
    scale: Rows
    zero: Rows | None = None
    group_of: np.ndarray | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows as float32."""
        found = self.whole(start, stop).astype(np.float32)
        if self.zero is not None:
            found -= self._spread(self.zero(start, stop).astype(np.float32))
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is said by the loader
            found *= self._spread(self.scale(start, stop).astype(np.float32))
        return found

    def _spread(self, by_group: np.ndarray) -> np.ndarray:
        """[n, groups] to [n, K]."""
        if self.group_of is not None:
            return by_group[:, self.group_of]
        return by_group if by_group.shape[1] == 1 else np.repeat(by_group, self.group, axis=1)[:, : self.shape[1]]

    @property
    def format(self) -> Format:
        """Its own groups, or parts of them that a product can have; int8 where outputs have a scale each."""
        return self._format

    @functools.cached_property
    def _format(self) -> Format:
        outputs, inputs = self.shape
        symmetric = self.zero is None or not self.zero(0, outputs).any()
        if self.bits == 8 and self.group >= inputs and symmetric:
            return "int8"
        if self.group_of is not None or (inputs % self.group and self.group < inputs):
            return "rounded"
        group = largest_group(min(self.group, inputs))
        kind = self.scale(0, 1).dtype.name if symmetric else "float32"
        return "rounded" if group is None else GroupFormat(self.bits, group, minimum=not symmetric, scale=kind)

    def numbers(self, start: int, stop: int) -> Numbers:
        """Rows as they are stored; zero points as minima."""
        form, whole, scale = self.format, self.whole(start, stop), self.scale(start, stop)
        if not isinstance(form, GroupFormat):
            return Numbers(whole, scale.astype(np.float32), None)
        # A large group is several of the product's.
        times = min(self.group, self.shape[1]) // form.group
        minimum = None
        if form.minimum:
            assert self.zero is not None
            scale = scale.astype(np.float32)
            offset = 8 if form.bits == 4 else 0  # minima count from the least number of 4 bits
            minimum = np.repeat(-scale * (self.zero(start, stop) + np.float32(offset)), times, axis=1)
        return Numbers(whole, np.repeat(scale, times, axis=1), minimum)


def largest_group(size: int) -> int | None:
    """The largest size of groups that a product can have which divides another size; None where there is none."""
    return next((group for group in _GROUPS if size % group == 0), None)


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] words of 32 bits to [..., 32 / bits * n] numbers of 4 or 8 bits, uint8, the lowest bits first."""
    found = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return found
    return np.stack([found & 15, found >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """int8 numbers around 0 of unsigned ones."""
    return (numbers ^ (1 << bits - 1)).view(np.int8) if bits == 8 else numbers.view(np.int8) - np.int8(8)


def words(count: int, bits: int) -> int:
    """Words of 32 bits that hold so many numbers."""
    return math.ceil(count * bits / 32)


class Recent:
    """The parts of the tensor that a thread reads, whole: of what is stored by inputs, an output lies everywhere."""

    def __init__(self) -> None:
        self._own = threading.local()

    def read(self, tensor: str, part: Stored) -> np.ndarray:
        """All of a part of the tensor of this name; the thread keeps it until it reads another tensor's."""
        held = self._own.__dict__
        if held.get("tensor") != tensor:
            held.clear()
            held["tensor"] = tensor
        if part.name not in held:
            held[part.name] = part.read()
        return held[part.name]


@dataclasses.dataclass(frozen=True)
class StoredInParts:
    """Base of the methods (:class:`Method`) whose parts have names that end in :attr:`ends`.

    Attributes:
      recent: what threads have read of parts that are stored by inputs.
    """

    ends: ClassVar[tuple[str, ...]]
    weight: str = dataclasses.field(default=".weight", kw_only=True)
    recent: Recent = dataclasses.field(default_factory=Recent, compare=False, kw_only=True)

    def end_of(self, stored: Stored) -> str | None:
        """One of its own ends."""
        return next((end for end in self.ends if stored.name.endswith(end)), None)

    def idle(self, name: str) -> bool:
        """None is."""
        return False


def check_parts(origin: str, stem: str, parts: Mapping[str, Stored], needed: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a matrix that lacks a part, or has one of another dtype than these, which safetensors call so."""
    for end, kinds in needed.items():
        if end not in parts:
            raise WeightsError(f"{origin} lacks {quoted(stem + end)}, a part of the weight {quoted(stem + '.weight')}.")
        if parts[end].kind not in kinds:
            raise WeightsError(
                f"{origin} is corrupt: {quoted(stem + end)} is stored as {parts[end].kind} in the place of "
                f"{' or '.join(kinds)}."
            )


def check_matrix(origin: str, part: Stored) -> None:
    """Refuse a part that is no matrix, or an empty one."""
    if len(part.shape) != 2 or not all(part.shape):
        raise WeightsError(f"{origin} is corrupt: {quoted(part.name)} has shape {list(part.shape)}.")


def groups_of(inputs: int, group: int | None) -> tuple[int, int]:
    """Inputs of a group, all of them for None, and how many groups there are; the last may be shorter."""
    size = min(group or inputs, inputs)
    return size, -(-inputs // size)


def check_shape(origin: str, part: Stored, *allowed: tuple[int, ...], asking: str = "the others") -> None:
    """Refuse a part that has none of these shapes, which something asks for."""
    if part.shape not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise WeightsError(
            f"{origin} is corrupt: {quoted(part.name)} has shape {list(part.shape)}, and {asking} ask for {shapes}."
        )


def order_of(origin: str, index: Stored | None, inputs: int, group: int) -> np.ndarray | None:
    """[K] the group of each input, as a part has them; None where those of a group follow each other."""
    if index is None:
        return None
    check_shape(origin, index, (inputs,), asking=f"{inputs} inputs")
    groups = -(-inputs // group)
    found = index.read()
    if found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= groups:
        raise WeightsError(f"{origin} is corrupt: {quoted(index.name)} names other groups than the {groups} there are.")
    return None if (found == np.arange(inputs) // group).all() else found.astype(np.int64)
