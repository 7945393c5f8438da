"""Profiles: what calibration found out about a model's heads, as frozen values and as small YAML files.

A profile is part of a policy, and a policy is a static argument of every compiled program, so a profile hashes in
constant time. It belongs to the model whose shape it names: a policy refuses another's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kvjax.documents import NotADocument, parse_yaml
from kvjax.errors import UsageError, quoted
from kvjax.files import reason, write_atomically
from kvjax.model.config import ModelConfig

#: One number a query head: [layer][head].
Table = tuple[tuple[float, ...], ...]
#: One number a layer.
Curve = tuple[float, ...]
#: KV heads by layer.
Heads = tuple[tuple[int, ...], ...]
#: How far a head of an ALiBi model may see: see :func:`scope_lengths`.
Bound = Literal["scaled", "paper", "safe"]
BOUNDS: tuple[Bound, ...] = ("scaled", "paper", "safe")


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
    """

    kind: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()
    curves: ClassVar[tuple[str, ...]] = ()
    vectors: ClassVar[tuple[str, ...]] = ()

    model: str
    shape: ModelShape
    source: str | None = dataclasses.field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        layers, heads = self.shape.num_layers, self.shape.num_heads
        for name in self.tables:
            table = getattr(self, name)
            if [len(row) for row in table] != [heads] * layers:
                raise UsageError(f"{name} of a profile of this model needs {layers} rows of {heads} numbers.")
            if not all(math.isfinite(value) for row in table for value in row):
                raise UsageError(f"{name} of a profile holds a number that is not finite; calibrate the model again.")
        width = self.shape.num_kv_heads * self.shape.head_dim
        for name in self.vectors:
            rows = getattr(self, name)
            if [len(row) for row in rows] != [width] * layers:
                raise UsageError(f"{name} of a profile of this model needs {layers} rows of {width} numbers.")
            if not all(math.isfinite(value) for row in rows for value in row):
                raise UsageError(f"{name} of a profile holds a number that is not finite; calibrate the model again.")
        for name in self.curves:
            curve = getattr(self, name)
            if len(curve) != layers or not all(math.isfinite(value) for value in curve):
                raise UsageError(f"{name} of a profile of this model needs {layers} finite numbers.")
        # Numbers alone: a text's hash differs from process to process, and this one travels with a pickled policy.
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in self._numbers)))

    @property
    def _numbers(self) -> tuple[str, ...]:
        return (*self.tables, *self.curves, *self.vectors)

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

    tokens: int
    repeats: int
    seed: int
    echo: Table
    induction: Table

    __hash__ = Profile.__hash__


@dataclasses.dataclass(frozen=True)
class ScopeProfile(Profile):
    """Bounds on how far each head of an ALiBi model sees (RazorAttention, section 3.1), for :func:`scope_lengths`.

    Attributes:
      paper: [layer][query head] the bound on a logit in equation [2] as printed, 2 |W_Q W_K^T| (|gamma|^2 + |b|^2),
        for logits that are not scaled; see :func:`scope_lengths`.
      safe: [layer][query head] the bound that holds for every input; see :mod:`kvjax.calibrate.alibi`.
      slopes: [layer][query head] l_h, what a head subtracts from its logit per token of distance.
    """

    kind: ClassVar[str] = "alibi-scopes"
    tables: ClassVar[tuple[str, ...]] = ("paper", "safe", "slopes")

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

    watershed: int
    dialogues: int
    rounds: int
    prominence: float
    divergence: Curve

    __hash__ = Profile.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
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

    pieces: int
    tokens: int
    filters: Table

    __hash__ = Profile.__hash__


@functools.lru_cache(maxsize=64)
def protected_heads(
    profile: HeadProfile, induction_share: float, echo_share: float, share_of: Literal["query", "kv"]
) -> Heads:
    """KV heads that keep everything, by layer: the top fractions by induction and by echo score, over all layers.

    With ``share_of="query"`` the fractions count query heads, and a KV head is protected when any of its query heads is
    among the top; with "kv" they count KV heads, each scored by the best of its query heads. A fraction above 0 is at
    least one head; of equal scores the earlier head's comes first.
    """
    group = profile.shape.num_heads // profile.shape.num_kv_heads
    chosen: set[tuple[int, int]] = set()
    for table, share in ((profile.induction, induction_share), (profile.echo, echo_share)):
        if share_of == "kv":
            table = _best_of_group(table, group)
        ranked = sorted((-score, layer, head) for layer, row in enumerate(table) for head, score in enumerate(row))
        count = max(round(share * len(ranked)), 1) if share > 0 else 0
        for _, layer, head in ranked[:count]:
            chosen.add((layer, head if share_of == "kv" else head // group))
    layers, heads = profile.shape.num_layers, profile.shape.num_kv_heads
    return tuple(tuple(head for head in range(heads) if (layer, head) in chosen) for layer in range(layers))


@functools.lru_cache(maxsize=64)
def scope_lengths(
    profile: ScopeProfile, bound: Bound, eps: float, attention_scale: float
) -> tuple[tuple[int, ...], ...]:
    """L_h of every KV head in whole tokens [2], [layer][KV head]; the longest of the query heads that share it.

    Args:
      profile: the bounds of a model's heads.
      bound: "scaled" is [2] for scaled logits, which is how every supported model computes them; "paper" is [2] as
        printed, without the scale; "safe" holds for every input.
      eps: the most attention a token beyond the scope may get.
      attention_scale: of the model's logits.
    """
    group = profile.shape.num_heads // profile.shape.num_kv_heads
    limits = profile.safe if bound == "safe" else profile.paper
    scale = attention_scale if bound == "scaled" else 1.0  # "safe" is stored scaled
    reach = tuple(
        tuple((limit * scale - math.log(eps)) / slope for limit, slope in zip(*rows, strict=True))
        for rows in zip(limits, profile.slopes, strict=True)
    )
    return tuple(tuple(math.ceil(length) for length in row) for row in _best_of_group(reach, group))


def _best_of_group(table: Table, group: int) -> Table:
    """The largest of each KV head's query heads."""
    return tuple(tuple(max(row[i : i + group]) for i in range(0, len(row), group)) for row in table)


_KINDS: dict[str, type[Profile]] = {
    kind.kind: kind for kind in (HeadProfile, ScopeProfile, WatershedProfile, FilterProfile)
}
AnyProfile = TypeVar("AnyProfile", bound=Profile)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as YAML, all of it or nothing.

    Raises:
      KvjaxError: the file cannot be written.
    """
    import yaml

    fields = {field.name: getattr(profile, field.name) for field in dataclasses.fields(profile) if field.compare}
    content: dict[str, Any] = {"kind": profile.kind}
    for name, value in fields.items():
        if name == "shape":
            content[name] = dataclasses.asdict(value)
        elif name in (*profile.tables, *profile.vectors):
            content[name] = [list(row) for row in value]
        else:
            content[name] = list(value) if name in profile.curves else value
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    write_atomically(Path(path), text)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile written by :func:`save_profile`.

    Raises:
      UsageError: no such file, not a profile, an unknown or a missing key, or values of the wrong kind.
    """
    try:
        content = parse_yaml(Path(path).read_bytes())
    except NotADocument as error:
        raise UsageError(f"{os.fspath(path)} is not a profile: {error}.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"The profile {os.fspath(path)} cannot be read: {reason(error)}.") from error
    kind = str(content.get("kind")) if isinstance(content, dict) else None
    if kind not in _KINDS:
        raise UsageError(
            f"{os.fspath(path)} is not a profile: its kind is {quoted(kind)}; known are {', '.join(_KINDS)}."
        )
    cls = _KINDS[kind]
    values = _fields(cls, content, os.fspath(path))
    shape = _fields(ModelShape, values["shape"], f"{os.fspath(path)}, shape")
    for name in (*cls.tables, *cls.vectors):
        values[name] = _table(values[name], f"{os.fspath(path)}, {name}")
    for name in cls.curves:
        values[name] = _table([values[name]], f"{os.fspath(path)}, {name}")[0]
    return cls(**(values | {"shape": ModelShape(**shape), "source": os.fspath(path)}))


def _fields(cls: type, content: Any, origin: str) -> dict[str, Any]:
    """The values of a dataclass's fields, exactly: a key too many or too few is an error, and so is another kind."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.compare}
    given = {name: value for name, value in content.items() if name != "kind"} if isinstance(content, Mapping) else {}
    if unknown := sorted(set(map(str, given)) - set(fields)):
        raise UsageError(f"{origin} has the unknown key {quoted(unknown[0])}; known are {', '.join(fields)}.")
    if missing := [name for name in fields if name not in given]:
        raise UsageError(f"{origin} does not say {quoted(missing[0])}; calibrate the model again.")
    for name, field in fields.items():
        kind = {"int": int, "str": str, "float": float}.get(str(field.type))
        if kind is not None and type(given[name]) is not kind:
            raise UsageError(f"{origin} has {quoted(given[name])} as {name}; a profile has a {kind.__name__} there.")
    return given


def _table(value: Any, origin: str) -> Table:
    rows = value if isinstance(value, list) else ["not a row"]
    if not all(isinstance(row, list) and all(type(x) in (int, float) for x in row) for row in rows):
        raise UsageError(f"{origin} is not a table of numbers, a row a layer; calibrate the model again.")
    return tuple(tuple(float(x) for x in row) for row in rows)


def folder() -> Path:
    """The folder of the profiles that come with kvjax: in an installed package, else in the repository."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parent / "configs" / "profiles"


@functools.lru_cache(maxsize=32)
def packaged(cls: type[AnyProfile], config: ModelConfig) -> AnyProfile | None:
    """The profile of this kind that comes with kvjax for a model of this shape, or None."""
    for path in sorted(folder().glob("*.yaml")):
        profile = load_profile(path)
        if isinstance(profile, cls) and profile.shape == ModelShape.of(config):
            return profile
    return None
