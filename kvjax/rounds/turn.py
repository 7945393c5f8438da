"""A question of a conversation of rounds, until it is read (section 3.2, algorithm 1).

:func:`read_question`: the question goes through the layers below the watershed (step 2), its attention there selects
rounds, those come to the device in one transfer (step 3), and the other layers read it with them (step 4). What it
leaves is an ordinary cache, which the decode loop takes over (step 5); ``closing.py`` then ends the turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from kvjax.allocation import Allocation
from kvjax.cache.buckets import NEW_TOKENS, RESERVE, batch_bucket, prompt_bucket, request_bucket, reserves
from kvjax.cache.cache import Cache, resize_layer
from kvjax.cache.continuation import delete
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage
from kvjax.committed import committed
from kvjax.device_memory import device_limit
from kvjax.errors import DoesNotFit
from kvjax.memory_needs import cache_bytes, prefill_bytes, weights_bytes
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.round_attention import RoundAttention
from kvjax.policies.split_cache import SplitCache, slots_above, slots_below
from kvjax.rounds.conversation import Conversation, UpperRows
from kvjax.rounds.round_programs import ONE_DEVICE, RoundPrograms, RoundUpload
from kvjax.rounds.selection import normalised, round_attention, select
from kvjax.rounds.steps import StagingBuffer, pages_onto
from kvjax.runtime.alike_layers import compiles_faster_by_layers
from kvjax.runtime.prefill_batches import PADDING_PROMPT, Note, read_prompts, unheard
from kvjax.sharding.mesh import Mesh
from kvjax.tables import human_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """The rounds, or tokens of rounds, that one row's question selected.

    Attributes:
      attention: [R] qAtt of the earlier rounds.
      selected: indices of the rounds it sees. tokens: tokens of them that it sees.
      parts: the rows that come to the device, and the slots they hold by layer and head, in order.
    """

    attention: Float[np.ndarray, " R"]
    selected: tuple[int, ...]
    tokens: int
    parts: tuple[tuple[UpperRows, Int[np.ndarray, "L H"]], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PendingTurn:
    """A question that has been read: what closing its round needs.

    Attributes:
      before: the conversation it was asked in, of which the lower layers may be consumed; None for the first question.
      policy: as of the conversation.
      start: [B] position of the round's first token.
      base: [L, B, H] slots before the round's own.
      choices: of each row; empty for the first question.
    """

    before: Conversation | None
    policy: RoundAttention
    start: Int[np.ndarray, " B"]
    base: Int[np.ndarray, "L B H"]
    choices: tuple[Selection, ...]

    def take(self, indices: Sequence[int]) -> PendingTurn:
        """Rows in the given order; several samples of a row share what it selected."""
        index = list(indices)
        return dataclasses.replace(
            self,
            before=None if self.before is None else self.before.records(index),
            start=self.start[index],
            base=self.base[:, index],
            choices=tuple(self.choices[i] for i in index) if self.choices else (),
        )


def read_question(
    params: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    policy: RoundAttention,
    before: Conversation | None,
    prefix: Sequence[int],
    consume: bool,
    dtype: Any,
    storage: Storage,
    memory_limit: int | None,
    programs: RoundPrograms = ONE_DEVICE,
    note: Note = unheard,
    reserve: int | None = None,
) -> tuple[Cache, jax.Array, PendingTurn]:
    """Read a question a row, on the rounds that it selects of its conversation.

    Args:
      prefix: of a first question, how many of its tokens belong to no round.
      consume: donate the buffers of ``before``.
      note: told of the newest cache after every program, so that a turn that fails can be undone.
      reserve: tokens of later turns to allocate below the watershed, over all rows together; None for the usual of a
        conversation that goes on. Less where it does not fit.

    Returns:
      A cache of all layers to decode on, the logits [B, V] after each question, and what :func:`close_round` needs; B
      as ``programs`` says, rows of padding last.

    Raises:
      DoesNotFit: a first question, or what a later one selects, is too large for the device; the conversation is as it
        was, unless consumed.
      UsageError: a row's rounds are in the memory of another host than the row.
    """
    real, batch = len(prompts), programs.rows(len(prompts))
    # A row of padding reads one token that is none, or nothing new of another row's conversation, of which it selects
    # no round.
    padding = [PADDING_PROMPT if before is None else ()]
    tokens, lengths = _batch_of([*prompts, *padding * (batch - real)])
    limit = device_limit(memory_limit)
    question = _Question(params, policy, programs, dtype, storage, limit, note, tokens, lengths, real)
    if before is None:
        return question.read_first(prompts, prefix, reserve or 0)
    read = question.read_onto(before, consume, RESERVE if reserve is None else reserve)
    given = read.x, read.seen, lengths, read.staging, read.held
    layers, logits = programs.upper(params, *given, policy=read.split, dtype=dtype, storage=storage)
    cache = read.cache.replace(layers=read.cache.layers + layers, policy=read.split)
    note(cache)
    return cache, logits, read.turn


def _batch_of(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """The prompts padded to a bucket, and their lengths."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), request_bucket(int(lengths.max()))), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


class _LowerRead(NamedTuple):
    """A later question that the layers below the watershed have read, and what those above it need.

    Attributes:
      cache: of the lower layers. x: hidden states that the upper layers read.
      split: the capacities below and above the watershed.
      seen: [B] tokens before the question.
      staging: the prefixes and selected rounds, on the device. held: [L, B, H] slots of theirs in the upper layers.
      turn: what closing the round needs.
    """

    cache: Cache
    x: jax.Array
    split: SplitCache
    seen: np.ndarray
    staging: StagingBuffer
    held: np.ndarray
    turn: PendingTurn


@dataclasses.dataclass(frozen=True, eq=False)
class _Question:
    """A batch of questions, and with what the layers below the watershed read it.

    Attributes:
      limit: bytes of the device, None where they are not known.
      tokens, lengths: of every row, the last ones padding. real: rows that are not.
    """

    params: Decoder
    policy: RoundAttention
    programs: RoundPrograms
    dtype: Any
    storage: Storage
    limit: int | None
    note: Note
    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, " B"]
    real: int

    @property
    def config(self) -> ModelConfig:
        return self.params.config

    @property
    def below(self) -> int:
        """The number of layers below the watershed."""
        return self.policy.layers_below(self.config)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def read_first(
        self, prompts: Sequence[Sequence[int]], prefix: Sequence[int], reserve: int
    ) -> tuple[Cache, jax.Array, PendingTurn]:
        """Read a conversation's first question, with ``reserve`` tokens for later turns where they fit.

        It selects nothing, so all layers read it one after the other, as any prompt.
        """
        longest, programs = int(self.lengths.max()), self.programs.of_tokens
        capacity, split = self._sizes(longest, longest, 0, reserve // self.batch, lasting=bool(reserve))
        self._check_fits(split, capacity, first=True)
        cache, logits = read_prompts(
            self.params,
            prompts,
            policy=split,
            cache=None,
            consume=False,
            dtype=self.dtype,
            storage=self.storage,
            programs=programs,
            note=self.note,
            size=Allocation(self.batch, capacity),
            by_layers=lambda tokens: compiles_faster_by_layers(split, self.config, programs.mesh),
        )
        if programs.mesh is None:  # as what comes from host memory on later turns is
            cache, logits = committed((cache, logits))
        start = np.array([*prefix, *[1] * (self.batch - self.real)], np.int32)
        base = np.broadcast_to(start[:, None], (self.config.num_layers, self.batch, self.config.num_kv_heads))
        return cache, logits, PendingTurn(None, self.policy, start, base, ())

    def read_onto(self, before: Conversation, consume: bool, reserve: int) -> _LowerRead:
        """Read a later question, select rounds by its attention, and bring them to the device."""
        below, programs, lengths = self.below, self.programs, self.lengths
        if before.batch < self.batch:
            wide = before.take([*range(self.real), *[0] * (self.batch - self.real)])
            self.note(wide.lower)
            if consume:
                delete(before)
            before, consume = wide, True
        programs.check(before.records(range(self.real)))
        slots = np.stack([before.slots(row)[-1] for row in range(self.batch)], axis=1)
        longest = int((slots[:below].max(axis=(0, 2)) + lengths).max())
        capacity, _ = self._sizes(longest, 0, before.lower.prompt_capacity, reserve // self.batch)
        seen = as_numpy(before.seen)
        cache, x, mass = self._read_lower(before.lower, capacity, consume)
        choices = tuple(
            _choose(self.policy, before, row, mass[row], below) if row < self.real else _NOTHING
            for row in range(self.batch)
        )
        slots[below:] = np.stack([_selected_slots(before, row, choices[row], below) for row in range(self.batch)], 1)
        upper = int((slots[below:].max(axis=(0, 2)) + lengths).max())
        _, split = self._sizes(longest, upper, capacity, 0)
        self._check_fits(split, capacity, first=False)
        held, width = slots[below:], self.tokens.shape[1]
        staging = _bring(self.config, before, choices, held, width, self.dtype, x, programs)
        return _LowerRead(cache, x, split, seen, staging, held, PendingTurn(before, self.policy, seen, slots, choices))

    def _read_lower(self, lower: Cache, capacity: int, consume: bool) -> tuple[Cache, jax.Array, np.ndarray]:
        """The lower layers' cache with ``capacity`` slots, their hidden states, and the question's attention there."""
        if consume and self.programs.mesh is None:
            lower = _with_pages(lower, pages_onto(self.config, lower, capacity), self.note)
        cache, x, mass = self.programs.lower_onto(
            self.params, lower, self.tokens, self.lengths, capacity=capacity, consume=consume
        )
        self.note(cache)
        return cache, x, as_numpy(mass)

    def _sizes(self, lower: int, upper: int, held: int, spare: int, *, lasting: bool = True) -> tuple[int, SplitCache]:
        """Slots to allocate below the watershed, and a split cache, for rows of so many slots below and above it.

        As :func:`~kvjax.policies.split_cache.slots_below` and ``slots_above``; exact where that needs
        more bytes than the limit, or rows of padding would have.
        """
        unpadded = self.programs.mesh is None and self.batch != batch_bucket(self.batch)
        spares = () if unpadded else reserves(lower, spare, outgrown=bool(held))
        for spare, exact in (*((count, False) for count in spares), (0, True)):
            capacity = slots_below(self.config, lower, held=held, spare=spare, exact=exact)
            split = SplitCache(self.below, slots_above(self.config, upper, lasting=lasting, exact=exact))
            if self.limit is None or self._need(split, capacity) <= self.limit:
                break
        return capacity, split

    def _need(self, split: SplitCache, capacity: int) -> int:
        """Bytes of the weights, of a cache with so many slots below the watershed, and of reading the question."""
        mesh = self.programs.mesh
        cache = cache_bytes(self.config, split, self.batch, capacity, NEW_TOKENS, self.dtype, self.storage, mesh)
        reading = prefill_bytes(self.config, self.policy, self.batch, int(self.lengths.max()), self.dtype, mesh)
        return weights_bytes(self.config, self.dtype, mesh) + cache + reading

    def _check_fits(self, split: SplitCache, capacity: int, *, first: bool) -> None:
        _check_fits(self._need(split, capacity), self.limit, self.programs.mesh, first=first)


def _with_pages(cache: Cache, pages: tuple[tuple[int, ...], ...], note: Note) -> Cache:
    """The cache with runs of so many pages, one layer after the other: each old layer goes before the next is made."""
    for i, (layer, wanted) in enumerate(zip(cache.layers, pages, strict=True)):
        if layer.pages != wanted:
            cache = cache.replace(layers=(*cache.layers[:i], _resize(layer, wanted), *cache.layers[i + 1 :]))
            note(cache)
            delete(cache.replace(layers=(layer,)))
    return cache


_resize = jax.jit(resize_layer, static_argnames=("pages",))

#: The selection of a row of padding, which has no prefix either.
_NOTHING = Selection(np.zeros(0), (), 0, ())


def _choose(
    policy: RoundAttention, before: Conversation, row: int, mass: Float[np.ndarray, "H C"], below: int
) -> Selection:
    """Select rounds of a row, or tokens of them, by a question's attention."""
    rounds = before.rounds[row]
    edges = before.slots(row)[1:, below - 1]
    attention = round_attention(mass, edges[:-1], edges[1:])
    if policy.granularity == "round":
        selected = tuple(int(i) for i in np.flatnonzero(select(policy, attention)))
        parts = tuple((rounds[i].upper, rounds[i].held[below:]) for i in selected)
        return Selection(attention, selected, sum(rounds[i].tokens for i in selected), parts)
    # Nothing chose among these rounds' tokens, so all heads hold the same ones.
    first, last = int(edges[0, 0]), int(edges[-1, 0])
    keep = select(policy, normalised(mass[:, first:last].sum(axis=0, dtype=np.float64)))
    parts, selected, start = [], [], 0
    for i, part in enumerate(rounds):
        index = np.flatnonzero(keep[start : start + part.tokens])
        start += part.tokens
        if len(index):
            selected.append(i)
            parts.append((_tokens_of(part.upper, index), np.full_like(part.held[below:], len(index))))
    return Selection(attention, tuple(selected), int(keep.sum()), tuple(parts))


def _tokens_of(upper: UpperRows, index: Int[np.ndarray, " N"]) -> UpperRows:
    """Some tokens of a round, gathered on the host so that nothing else travels."""
    padded = np.pad(index, (0, prompt_bucket(len(index)) - len(index)))
    v_scale = upper.v_scale

    def gathered(x: Any, axis: int) -> Any:
        if not x.addressable_shards:  # another process's row, of which only the size counts here
            shape = (*x.shape[:axis], len(padded), *x.shape[axis + 1 :])
            return np.broadcast_to(np.zeros((), x.dtype), shape)
        return np.take(np.asarray(x), padded, axis=axis)

    return dataclasses.replace(
        upper, kv=gathered(upper.kv, 3), v_scale=None if v_scale is None else gathered(v_scale, 2)
    )


def _selected_slots(before: Conversation, row: int, choice: Selection, below: int) -> Int[np.ndarray, "L H"]:
    """Slots of the prefix and of the selected rounds, above the watershed."""
    return before.prefix[row].held[below:] + sum(held for _, held in choice.parts)


def _bring(
    config: ModelConfig,
    before: Conversation,
    choices: Sequence[Selection],
    slots: Int[np.ndarray, "L B H"],
    tokens: int,
    dtype: Any,
    x: jax.Array,
    programs: RoundPrograms,
) -> StagingBuffer:
    """The prefixes and the selected rounds on the device, one behind the other."""
    layers, batch, heads = slots.shape
    uploads: list[RoundUpload] = []
    ends = 0
    for row, choice in enumerate(choices):
        prefix = before.prefix[row]
        if choice is _NOTHING:
            continue
        offset = np.zeros((layers, heads), np.int32)
        for upper, held in ((prefix.upper, prefix.held[-layers:]), *choice.parts):
            uploads.append(RoundUpload(row, upper, offset))
            ends = max(ends, int(offset.max()) + upper.kv.shape[3])
            offset = offset + held
    capacity = slots_above(config, max(ends, int(slots.max()) + tokens))
    return programs.stage(uploads, (layers, 2, batch, heads, capacity, config.head_dim), dtype, x)


def _check_fits(need: int, limit: int | None, mesh: Mesh | None, *, first: bool) -> None:
    """Refuse (DoesNotFit) what needs more bytes than there are: a first question, or the rounds of a later one."""
    if limit is not None and need > limit:
        what, would = (
            ("A first question, which is read with all layers on the device, makes", "a shorter one would fit")
            if first
            else (
                "The rounds this question selects make",
                "a smaller top, a higher threshold, or an inner policy would bring less",
            )
        )
        each = "" if mesh is None else " on each device"
        raise DoesNotFit(
            f"{what} {human_bytes(need)} with the weights{each} and the limit is {human_bytes(limit)}; {would}."
        )
