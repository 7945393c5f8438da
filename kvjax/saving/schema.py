"""The schema of a saved cache's description: what each part must be, and what the parts say of one another.

A changed description would have memory allocated for slots that were never there, or rows dropped without a word. One
that carries its own digest is as it was written. Version 0.1 wrote none; of its sizes, those are refused that no cache
of the policy can have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from kvjax.cache.buckets import MEDIUM, SHORT, prompt_bucket, slots_of
from kvjax.cache.groups import parts
from kvjax.cache.quantisation import Storage
from kvjax.checkpoints.load import LanguageModel
from kvjax.checks import MOST
from kvjax.documents import NotADocument, validated
from kvjax.errors import quoted
from kvjax.policies.base import Policy
from kvjax.policies.page_capacities import by_pool
from kvjax.policies.round_attention import RoundAttention
from kvjax.policies.split_cache import SplitCache
from kvjax.saving.description import description_digest

#: Slots of a head beyond what a policy asks for: whole pages on many devices, and a page a head of shared slots.
_SPARE_SLOTS = 2**14


def _in_range(name: str, value: int, least: int, most: int = MOST) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} is {quoted(value)}")


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """The model that a cache is of; see :func:`kvjax.saving.description.model_identity`."""

    name: str
    config: str
    weights: str


@dataclasses.dataclass(frozen=True)
class SavedStorage:
    """The storage of the rows."""

    kind: Literal["model", "int8"]
    headroom: float

    def __post_init__(self) -> None:
        Storage(self.kind, self.headroom)


@dataclasses.dataclass(frozen=True)
class Checksum:
    """CRC-32 of the arrays in a dtype, and the digest of the description, which version 0.1 did not write."""

    dtype: str
    crc32: int
    description: str | None = None


@dataclasses.dataclass(frozen=True)
class SavedRound:
    """A round without its arrays; see :class:`kvjax.rounds.conversation.Round`.

    Attributes:
      layers: those above the watershed. room: slots of its array. count: those of them that are written.
    """

    start: int
    tokens: int
    used: int
    held: tuple[tuple[int, ...], ...]
    layers: int
    room: int
    count: int

    def __post_init__(self) -> None:
        for name in ("start", "tokens", "used"):
            _in_range(name, getattr(self, name), 0)
        _in_range("layers", self.layers, 1, len(self.held) - 1)
        for head in (head for layer in self.held for head in layer):
            _in_range("held", head, 0, self.tokens)
        _in_range("count", self.count, most := max((1, *sum(self.held[-self.layers :], ()))), most)
        _in_range("room", self.room, self.count)


@dataclasses.dataclass(frozen=True)
class SavedRounds:
    """The prefix and the rounds of each row, and the policy that chooses among them."""

    asked: tuple[int, ...]
    parts: tuple[tuple[SavedRound, ...], ...]
    policy: dict[str, Any]

    def __post_init__(self) -> None:
        if len(self.asked) != len(self.parts):
            raise ValueError(f"asked is of {len(self.asked)} rows, and parts of {len(self.parts)}")
        for asked, row in zip(self.asked, self.parts, strict=True):
            _in_range("asked", asked, 0)
            if not row:
                raise ValueError("a row of parts has no prefix")
            for part in row:
                _in_range("used", part.used, 0, asked)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The description of a saved cache.

    Attributes:
      prompt_room, new_room: version 1's names of ``prompt_capacity`` and ``new_capacity``.
      slots: of each head, by layer of the cache. counts: slots that are written of each head, by layer and pool.
      page_size: where it was saved, of heads that share slots.
      once: whether what comes later is all kept.
    """

    kind: str
    version: int
    kvjax: str
    model: SavedModel
    policy: dict[str, Any]
    storage: SavedStorage
    batch: int
    prompt_room: int
    new_room: int
    slots: tuple[tuple[int, ...], ...]
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    rounds: SavedRounds | None = None
    joined_tokens: int = 0
    page_size: int | None = None
    once: bool = False
    checksum: Checksum | None = None

    def __post_init__(self) -> None:
        _in_range("batch", self.batch, 1)
        for name in ("prompt_room", "new_room"):
            _in_range(name, getattr(self, name), 0)
        _in_range("joined_tokens", self.joined_tokens, 0, 2 * MOST)
        if self.page_size is not None:
            _in_range("page_size", self.page_size, 1)
        for head in (head for layer in self.slots for head in layer):
            _in_range("slots", head, 1)
        for head in (head for layer in self.counts for pool in layer for head in pool):
            _in_range("counts", head, 0)
        if len(self.counts) != len(self.slots):
            raise ValueError(f"slots is of {len(self.slots)} layers, and counts of {len(self.counts)}")
        if self.rounds is not None and len(self.rounds.asked) != self.batch:
            raise ValueError(f"batch is {self.batch}, and rounds are of {len(self.rounds.asked)} rows")

    @property
    def is_as_written(self) -> bool:
        """Whether its digest shows that nobody changed it."""
        return self.checksum is not None and self.checksum.description is not None


def read_description(found: dict[str, Any]) -> Saved:
    """A description out of JSON.

    Raises:
      NotADocument: its digest is another's, or a part is missing, of another kind or out of range.
    """
    saved: Saved = validated(Saved, found)
    if saved.is_as_written and saved.checksum is not None and saved.checksum.description != description_digest(found):
        raise NotADocument("its digest differs")
    return saved


def check_policy(saved: Saved, policy: Policy, chooser: Policy | None, lm: LanguageModel) -> None:
    """Refuse (NotADocument) layers, heads and sizes that no cache of this policy has; before any shape is made.

    Args:
      chooser: the policy of the rounds, if there are any.
    """
    config = lm.config
    below = config.num_layers
    if chooser is not None:
        if not isinstance(chooser, RoundAttention) or not isinstance(policy, SplitCache):
            raise NotADocument("rounds are of a policy that has none")
        below = chooser.layers_below(config)
        if policy != SplitCache(below):
            raise NotADocument(f"policy is {quoted(policy)}")
        _check_rounds(saved, chooser, below, lm)
    elif policy.offloads_rounds or isinstance(policy, SplitCache):
        raise NotADocument("rounds are missing")
    heads = by_pool(policy, [(0,) * policy.heads_of(config, layer) for layer in range(below)])
    if [len(layer) for layer in saved.slots] != [len(layer) for layer in heads]:
        raise NotADocument(f"slots are of {[len(layer) for layer in saved.slots]} heads")
    if not saved.is_as_written:
        _check_slots(saved, policy, lm)


def _check_slots(saved: Saved, policy: Policy, lm: LanguageModel) -> None:
    config = lm.config
    # Joined rows have the least of their capacities for new tokens, and the largest of their allocations; rows that
    # shared a context have its slots beside their own.
    if not policy.beyond_context:
        for name in ("prompt_room", "new_room"):
            _most(name, getattr(saved, name), 2 * max(MEDIUM, prompt_bucket(config.max_position)))
    new = max(saved.new_room, config.max_position)
    wanted = by_pool(policy, policy.capacities(config, max(saved.prompt_room, 1), new))
    for layer, capacities in zip(saved.slots, wanted, strict=False):
        for slots, capacity in zip(layer, capacities, strict=True):
            _most("slots", slots, 2 * capacity + _SPARE_SLOTS)


def _check_rounds(saved: Saved, chooser: RoundAttention, below: int, lm: LanguageModel) -> None:
    assert saved.rounds is not None
    config = lm.config
    shape = [config.num_kv_heads] * config.num_layers
    for row in saved.rounds.parts:
        for part in row:
            if [len(layer) for layer in part.held] != shape or part.layers != config.num_layers - below:
                raise NotADocument("a round is of other layers or heads than the model's")
            if chooser.inner is None and {head for layer in part.held for head in layer} != {part.tokens}:
                raise NotADocument(f"a round of {part.tokens:,} tokens holds others")
    if saved.is_as_written:
        return
    for row in saved.rounds.parts:
        end = 0
        for part in row:
            if part.start < end:
                raise NotADocument(f"rounds.parts has a round at {part.start}, within the one before it")
            end = part.start + part.tokens
            _most("start and tokens", end, max(saved.prompt_room + saved.new_room, config.max_position))
            # On a mesh, rounded up to a multiple of the devices that share a head.
            _most("room", part.room, 2 * max(SHORT, prompt_bucket(part.count), slots_of(part.count)))
    for layer, (count,) in enumerate(saved.counts):
        rows = [[sum(heads) for heads in zip(*(part.held[layer] for part in row), strict=True)]
                for row in saved.rounds.parts]  # fmt: skip
        if [max(heads) for heads in zip(*rows, strict=True)] != list(count):
            raise NotADocument("counts are not what the rounds hold")


def _most(name: str, value: int, most: int) -> None:
    if value > most:
        raise NotADocument(f"{name} is {value:,}, where at most {most:,} can be")


def check_shapes(saved: Any, wanted: Any) -> None:
    """Refuse (NotADocument) a tree of arrays on disk that has not the names and shapes of another."""
    there, shapes = (
        {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (saved, wanted)
    )
    for name in sorted(there.keys() | shapes.keys()):
        if there.get(name) != shapes.get(name):
            raise NotADocument(f"the array {name} is {there.get(name)}, and {shapes.get(name)} is described")


def check_counts(counts: Sequence[Sequence[Sequence[int]]], layers: Sequence[Any]) -> None:
    """Refuse (NotADocument) counts of slots that the pools of a cache's layers do not have."""
    for pools, layer in zip(counts, layers, strict=True):
        wanted = [pool.most_slots for pool in parts(layer)]
        if [len(pool) for pool in pools] != [len(pool) for pool in wanted]:
            raise NotADocument("counts are of other heads than slots")
        for pool, slots in zip(pools, wanted, strict=True):
            for count, most in zip(pool, slots, strict=True):
                _most("counts", count, most)


__all__ = ["Saved", "SavedRound", "SavedRounds", "check_counts", "check_policy", "check_shapes", "read_description"]
