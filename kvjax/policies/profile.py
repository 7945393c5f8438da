"""Profiles: what calibration found out about a model's heads, as frozen values and as small YAML files.

A profile is part of a policy, and a policy is a static argument of every compiled program, so a profile hashes in
constant time. It belongs to the model whose shape it names: a policy refuses another's.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from kvjax.checks import MOST, MOST_NUMBER, MOST_SEED, MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import MOST_SIZE, ModelConfig

#: One number a query head: [layer][head].
Table = tuple[tuple[float, ...], ...]
#: One number a layer.
Curve = tuple[float, ...]
#: Many numbers: [layer] the layer's as base64 text, in a dtype of NumPy that the kind of profile names.
Packed = tuple[str, ...]
#: Dtypes of packed numbers: float16 and float32, little-endian.
HALF, SINGLE = "<f2", "<f4"
#: KV heads by layer.
Heads = tuple[tuple[int, ...], ...]
#: How far a head of an ALiBi model may see: see :func:`~kvjax.policies.head_choice.scope_lengths`.
Bound = Literal["scaled", "paper", "safe"]
BOUNDS: tuple[Bound, ...] = ("scaled", "paper", "safe")
#: The least and most that numbers of a profile may be, by their names.
Counts = Mapping[str, tuple[int, int]]
Ranges = Mapping[str, tuple[float, float]]
#: A fraction of attention, which rounding may leave a little above 1.
_FRACTION = 0.0, 1.001
#: Bounds of logits and slopes, whose quotient is a whole number of tokens.
_LIMIT, _SLOPE = (0.0, MOST_NUMBER), (1e-9, MOST_NUMBER)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The part of a ``ModelConfig`` that identifies a model; its fine-tuned versions use the same profile."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type == "int":
                whole_number(f"{field.name} of a profile's shape", getattr(self, field.name), 1, MOST_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"A profile's shape has {self.num_heads} heads and {self.num_kv_heads} KV heads; give a multiple of "
                "the KV heads as heads."
            )

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})


def model_name(name: str) -> str:
    """The name of a model in a profile: as it was loaded, without the folders of a file's path."""
    return Path(name).name if Path(name).exists() else name


@dataclasses.dataclass(frozen=True)
class Profile:
    """Base class of profiles.

    Attributes:
      model: the name its model was loaded as; of a file or folder, its own.
      shape: the model it belongs to.
      source: the file it was read from; no part of its value.
      tables, curves, vectors, kv_tables, packed: the names of its numbers, by their form; of packed ones their dtypes.
      counts, ranges: least and most of each of its whole numbers, and of the numbers of each table, curve or vector
        that has bounds besides those of float32, in which they are computed with.
    """

    kind: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    curves: ClassVar[tuple[str, ...]] = ()
    vectors: ClassVar[tuple[str, ...]] = ()
    kv_tables: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[Mapping[str, str]] = {}
    counts: ClassVar[Counts] = {}
    ranges: ClassVar[Ranges] = {}

    model: str
    shape: ModelShape
    source: str | None = dataclasses.field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        layers, kv = self.shape.num_layers, self.shape.num_kv_heads
        widths = dict.fromkeys(self.tables, self.shape.num_heads) | dict.fromkeys(self.kv_tables, kv)
        for name, width in (widths | dict.fromkeys(self.vectors, kv * self.shape.head_dim)).items():
            rows = getattr(self, name)
            if len(rows) != layers or any(len(row) != width for row in rows):
                raise UsageError(f"{name} of a profile of this model needs {layers} rows of {width} numbers.")
            for row in rows:
                self._check_numbers(name, row)
        for name, dtype in self.packed.items():
            rows, width = getattr(self, name), self.packed_width(name)
            found = [unpacked(row, dtype) for row in rows]
            if len(found) != layers or any(row is None or len(row) != width for row in found):
                raise UsageError(f"{name} of a profile of this model needs {layers} texts of {width} packed numbers.")
            if not all(np.isfinite(row).all() for row in found if row is not None):
                raise UsageError(f"{name} of a profile holds a number that is not finite; calibrate the model again.")
        for name in self.curves:
            curve = getattr(self, name)
            if len(curve) != layers:
                raise UsageError(f"{name} of a profile of this model needs {layers} finite numbers.")
            self._check_numbers(name, curve)
        for name, bounds in self.counts.items():
            whole_number(f"{name} of a profile", getattr(self, name), *bounds)
        # Numbers alone: a text's hash differs from process to process, and this one travels with a pickled policy.
        numbers = [getattr(self, name) for name in self._numbers]
        numbers += [zlib.crc32("".join(getattr(self, name)).encode()) for name in self.packed]
        object.__setattr__(self, "_hash", hash(tuple(numbers)))

    def packed_width(self, name: str) -> int:
        """How many numbers a layer has under this name of ``packed``."""
        raise NotImplementedError

    def packed_layer(self, name: str, layer: int) -> np.ndarray:
        """[N] float32 numbers of one layer under this name of ``packed``."""
        row = unpacked(getattr(self, name)[layer], self.packed[name])
        assert row is not None
        return row.astype(np.float32)

    def _check_numbers(self, name: str, row: tuple[float, ...]) -> None:
        """Refuse a number that float32 does not hold, or that is not within its bounds."""
        least, most = self.ranges.get(name, (-MOST_NUMBER, MOST_NUMBER))
        for value in row:
            if not abs(value) <= MOST_NUMBER:
                raise UsageError(
                    f"{name} of a profile holds {value:g}, which is not finite in float32; calibrate the model again."
                )
            if not least <= value <= most:
                above = " or more" if most == MOST_NUMBER else f" to {most:g}"
                raise UsageError(
                    f"{name} of a profile holds {value:g}, which is not of {least:g}{above}; calibrate the model again."
                )

    @property
    def _numbers(self) -> tuple[str, ...]:
        return (*self.rows_of_numbers(), *self.curves)

    @classmethod
    def rows_of_numbers(cls) -> tuple[str, ...]:
        """The names of what has a row of numbers a layer."""
        return (*cls.tables, *cls.kv_tables, *cls.vectors)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return self.source or self.model

    def check(self, config: ModelConfig) -> None:
        """Refuse a model this profile was not made of (UsageError)."""
        shape = ModelShape.of(config)
        if shape == self.shape:
            return
        differing = [
            f"{field.name} {getattr(self.shape, field.name)} instead of {getattr(shape, field.name)}"
            for field in dataclasses.fields(ModelShape)
            if getattr(self.shape, field.name) != getattr(shape, field.name)
        ]
        raise UsageError(
            f"The profile {self} belongs to another model ({', '.join(differing)}); "
            f"make this one's with `kvjax calibrate {self.kind}`."
        )


@dataclasses.dataclass(frozen=True)
class HeadProfile(Profile):
    """Echo and induction score of every query head of a rotary model (RazorAttention, section 3.3).

    Attributes:
      tokens, repeats, seed: K random tokens, how often they were repeated, and their seed.
      echo: [layer][query head] attention to earlier occurrences of the current token, mean over queries.
      induction: [layer][query head] attention to the tokens after those occurrences, mean over queries.
    """

    kind: ClassVar[str] = "retrieval-heads"
    tables: ClassVar[tuple[str, ...]] = ("echo", "induction")
    counts: ClassVar[Counts] = {"tokens": (1, MOST), "repeats": (2, MOST), "seed": (0, MOST_SEED)}
    ranges: ClassVar[Ranges] = {"echo": _FRACTION, "induction": _FRACTION}

    tokens: int
    repeats: int
    seed: int
    echo: Table
    induction: Table

    __hash__ = Profile.__hash__


@dataclasses.dataclass(frozen=True)
class ScopeProfile(Profile):
    """Bounds on how far each head of an ALiBi model sees (RazorAttention, section 3.1), for ``scope_lengths``.

    Attributes:
      paper: [layer][query head] the bound on a logit in equation [2] as printed, 2 |W_Q W_K^T| (|gamma|^2 + |b|^2),
        for logits that are not scaled; see ``scope_lengths``.
      safe: [layer][query head] the bound that holds for every input; see :mod:`kvjax.calibrate.alibi`.
      slopes: [layer][query head] l_h, what a head subtracts from its logit per token of distance.
    """

    kind: ClassVar[str] = "alibi-scopes"
    tables: ClassVar[tuple[str, ...]] = ("paper", "safe", "slopes")
    ranges: ClassVar[Ranges] = {"paper": _LIMIT, "safe": _LIMIT, "slopes": _SLOPE}

    paper: Table
    safe: Table
    slopes: Table

    __hash__ = Profile.__hash__


@dataclasses.dataclass(frozen=True)
class WatershedProfile(Profile):
    """The layer from which on layers agree about which rounds of a conversation matter (Round Attention, appendix B).

    Attributes:
      watershed: L_w, a count: layers ``0 .. watershed - 1`` keep every round on the device.
      dialogues, rounds: how many were read, and how many earlier rounds their last questions had together.
      prominence: what the curve rises by around the minimum, at least, as a fraction of it.
      divergence: [layer] mean KL divergence (nats) of the layer's distribution of attention over rounds to those of all
        later layers, mean over dialogues; 0 for the last layer, which has none.
    """

    kind: ClassVar[str] = "watershed"
    curves: ClassVar[tuple[str, ...]] = ("divergence",)
    counts: ClassVar[Counts] = {"dialogues": (1, MOST), "rounds": (1, MOST)}
    # A divergence is the logarithm of a quotient of float64 at most.
    ranges: ClassVar[Ranges] = {"divergence": (0.0, 1000.0)}

    watershed: int
    dialogues: int
    rounds: int
    prominence: float
    divergence: Curve

    __hash__ = Profile.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        number("prominence of a profile", self.prominence, 0, open_below=True)
        if not 1 <= self.watershed < self.shape.num_layers:
            raise UsageError(
                f"The watershed of a profile is {self.watershed}; a model of {self.shape.num_layers} layers has one of "
                f"1 to {self.shape.num_layers - 1}."
            )


@dataclasses.dataclass(frozen=True)
class FilterProfile(Profile):
    """The direction that the queries of each KV head share (Q-Filters, arXiv 2503.02812).

    Attributes:
      pieces, tokens: of text that were read.
      filters: [layer][KV head x channel] of keys after rotary embedding; of length 1 where a group has one query head.
    """

    kind: ClassVar[str] = "qfilters"
    vectors: ClassVar[tuple[str, ...]] = ("filters",)
    counts: ClassVar[Counts] = {"pieces": (1, MOST), "tokens": (1, MOST)}
    # A filter is no longer than 1; what is far longer overflows float32 where keys are multiplied by it.
    ranges: ClassVar[Ranges] = {"filters": (-1000.0, 1000.0)}

    pieces: int
    tokens: int
    filters: Table

    __hash__ = Profile.__hash__


@dataclasses.dataclass(frozen=True)
class ScorerProfile(Profile):
    """A linear map of each KV head from hidden states to the log of KVzip's score (after KVzap, arXiv 2601.07891).

    Attributes:
      texts, tokens: pieces of text that were read, and tokens of them that it was trained on.
      steps: of training.
      correlation: of what it says with what is true, on tokens of texts it was not trained on, mean over heads.
      weights: [layer] of each KV head a weight a channel of what the layer's projections of attention read, and last
        what is added; float16, see :data:`Packed`.
    """

    kind: ClassVar[str] = "scorer"
    packed: ClassVar[Mapping[str, str]] = {"weights": HALF}
    counts: ClassVar[Counts] = {"texts": (1, MOST), "tokens": (1, MOST), "steps": (1, MOST)}

    texts: int
    tokens: int
    steps: int
    correlation: float
    weights: Packed

    __hash__ = Profile.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        number("correlation of a profile", self.correlation, -1, 1)

    def packed_width(self, name: str) -> int:
        return self.shape.num_kv_heads * (self.shape.hidden_size + 1)

    def of_layer(self, layer: int) -> np.ndarray:
        """[H, M + 1] float32 weights of one layer."""
        return self.packed_layer("weights", layer).reshape(self.shape.num_kv_heads, -1)


@dataclasses.dataclass(frozen=True)
class GateProfile(Profile):
    """How much of its attention to all tokens each KV head needs (DuoAttention, arXiv 2410.10819).

    Attributes:
      tokens, steps: of each text, and of training. sink, recent: tokens that streaming attention saw.
      gates: [layer][KV head] alpha, 0 to 1: high of retrieval heads.
    """

    kind: ClassVar[str] = "gates"
    kv_tables: ClassVar[tuple[str, ...]] = ("gates",)
    counts: ClassVar[Counts] = dict(tokens=(1, MOST), steps=(1, MOST), sink=(0, MOST_SLOTS), recent=(1, MOST_SLOTS))
    ranges: ClassVar[Ranges] = {"gates": (0.0, 1.0)}

    tokens: int
    steps: int
    sink: int
    recent: int
    gates: Table

    __hash__ = Profile.__hash__


@dataclasses.dataclass(frozen=True)
class StatisticsProfile(Profile):
    """Statistics of a model's queries and keys over texts (after ExpectedAttention, arXiv 2510.00636, and KeyDiff).

    Attributes:
      pieces, tokens: of text that were read. seed: of which pieces. sink: tokens of each whose queries do not count.
      means: [layer] of each query head the mean of its queries before rotary embedding; float32, see :data:`Packed`.
      roots: [layer] of each query head the lower triangle, row by row, of a matrix R whose product R R' is the
        covariance of these queries: as float16 it has the range of their square roots, and the product is a covariance
        whatever was rounded.
      anchors: [layer] of each KV head the mean of its keys after rotary embedding, each of length 1; float32.
    """

    kind: ClassVar[str] = "statistics"
    packed: ClassVar[Mapping[str, str]] = {"means": SINGLE, "roots": HALF, "anchors": SINGLE}
    counts: ClassVar[Counts] = dict(pieces=(1, MOST), tokens=(1, MOST), seed=(0, MOST_SEED), sink=(0, MOST_SLOTS))

    pieces: int
    tokens: int
    seed: int
    sink: int
    means: Packed = dataclasses.field(repr=False)  # megabytes
    roots: Packed = dataclasses.field(repr=False)
    anchors: Packed = dataclasses.field(repr=False)

    __hash__ = Profile.__hash__

    def packed_width(self, name: str) -> int:
        shape = self.shape
        heads = shape.num_kv_heads if name == "anchors" else shape.num_heads
        return heads * (len(_triangle(shape.head_dim)[0]) if name == "roots" else shape.head_dim)

    def queries(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The mean [H, G, D] and the covariance [H, G, D, D] of a layer's queries before rotary embedding, float32."""
        shape = self.shape
        heads, dim = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads), shape.head_dim
        roots = np.zeros((*heads, dim, dim), np.float32)
        roots[..., *_triangle(dim)] = self.packed_layer("roots", layer).reshape(*heads, -1)
        return self.packed_layer("means", layer).reshape(*heads, dim), roots @ roots.swapaxes(-1, -2)

    def anchor(self, layer: int) -> np.ndarray:
        """[H, D] float32: the mean of a layer's normalised keys."""
        return self.packed_layer("anchors", layer).reshape(self.shape.num_kv_heads, -1)


def lower_roots(covariance: np.ndarray) -> np.ndarray:
    """[..., D (D + 1) / 2] the lower triangle of a matrix R with R R' = ``covariance``, of any rank."""
    values, vectors = np.linalg.eigh(covariance)
    factor = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
    upper = np.asarray(np.linalg.qr(factor.swapaxes(-1, -2), mode="r"))
    return upper.swapaxes(-1, -2)[..., *_triangle(covariance.shape[-1])]


def _triangle(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each number of a lower triangle, row by row."""
    return np.tril_indices(dim)


def packed_numbers(rows: np.ndarray, dtype: str = HALF) -> Packed:
    """The numbers of each layer, [layer, ...], as a profile has them."""
    return tuple(base64.b64encode(np.ascontiguousarray(row, dtype).tobytes()).decode() for row in rows)


def unpacked(text: str, dtype: str = HALF) -> np.ndarray | None:
    """Undo :func:`packed_numbers` of one layer, [N]; None of what is no such text."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype)
    except (ValueError, TypeError):
        return None


KINDS: dict[str, type[Profile]] = {
    kind.kind: kind
    for kind in (
        HeadProfile,
        ScopeProfile,
        WatershedProfile,
        FilterProfile,
        ScorerProfile,
        GateProfile,
        StatisticsProfile,
    )
}
