"""A question of a conversation of rounds, until it is read (section 3.2, algorithm 1).

:func:`read_question`: the question goes through the layers below the watershed (step 2), its attention there selects
rounds, those come to the device in one transfer (step 3), and the other layers read it with them (step 4). What it
leaves is an ordinary cache, which the decode loop takes over (step 5); ``closing.py`` then ends the turn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from kvjax.cache.buckets import MEDIUM, NEW_TOKENS, RESERVE, prompt_bucket, request_bucket
from kvjax.cache.cache import Cache, resize_layer
from kvjax.cache.continuation import delete
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.quantisation import Storage
from kvjax.device_memory import device_limit
from kvjax.errors import DoesNotFit
from kvjax.memory_needs import cache_bytes, weights_bytes
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder
from kvjax.policies.round_attention import RoundAttention
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import Conversation, UpperRows
from kvjax.rounds.programs import ONE_DEVICE, RoundPrograms, RoundUpload
from kvjax.rounds.selection import normalised, round_attention, select
from kvjax.rounds.steps import StagingBuffer, pages_onto
from kvjax.runtime.reading import Note, unheard
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
    config, below = params.config, policy.layers_below(params.config)
    real, batch = len(prompts), programs.rows(len(prompts))
    # A row of padding reads one token, or nothing new of another row's conversation, of which it selects no round.
    prompts = [*prompts, *([prompts[0][:1]] if before is None else [()]) * (batch - real)]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((batch, request_bucket(int(lengths.max()))), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    kinds = {"dtype": dtype, "storage": storage}

    def needed(split: SplitCache, room: int) -> int:
        weights = weights_bytes(config, dtype, programs.mesh)
        return weights + cache_bytes(config, split, batch, room, NEW_TOKENS, dtype, storage, programs.mesh)

    limit = device_limit(memory_limit)
    sizes = functools.partial(_sizes, config, below, needed, limit)

    staging = slots = None
    if before is None:
        longest, spare = int(lengths.max()), (reserve or 0) // batch
        room, split = sizes(longest, longest, 0, spare)
        _check_fits(needed(split, room), limit, programs.mesh, first=True)
        cache, x = programs.lower_fresh(params, tokens, lengths, policy=SplitCache(below), room=room, **kinds)
        seen, first = np.zeros_like(lengths), np.array([*prefix, *[1] * (batch - real)], np.int32)
        base = np.broadcast_to(first[:, None], (config.num_layers, batch, config.num_kv_heads))
        asked = PendingTurn(None, policy, first, base, ())
    else:
        if before.batch < batch:
            wide = before.take([*range(real), *[0] * (batch - real)])
            note(wide.lower)
            if consume:
                delete(before)
            before, consume = wide, True
        programs.check(before.records(range(real)))
        slots = np.stack([before.slots(row)[-1] for row in range(batch)], axis=1)
        longest, held = int((slots[:below].max(axis=(0, 2)) + lengths).max()), before.lower.prompt_capacity
        spare = (RESERVE if reserve is None else reserve) // batch
        room, _ = sizes(longest, 0, held, spare)
        seen = as_numpy(before.seen)
        lower = before.lower
        if consume and programs.mesh is None:
            lower = _with_pages(lower, pages_onto(config, lower, room), note)
        cache, x, mass = programs.lower_onto(params, lower, tokens, lengths, room=room, consume=consume)
        note(cache)
        mass = as_numpy(mass)
        choices = tuple(
            _choose(policy, before, row, mass[row], below) if row < real else _NOTHING for row in range(batch)
        )
        slots[below:] = np.stack([_selected_slots(before, row, choices[row], below) for row in range(batch)], 1)
        upper = int((slots[below:].max(axis=(0, 2)) + lengths).max())
        _, split = sizes(longest, upper, room, 0)
        _check_fits(needed(split, room), limit, programs.mesh, first=False)
        staging = _bring(config, before, choices, slots[below:], tokens.shape[1], dtype, x, programs)
        asked = PendingTurn(before, policy, seen, slots, choices)
    held = None if slots is None else slots[below:]
    layers, logits = programs.upper(params, x, seen, lengths, staging, held, policy=split, **kinds)
    cache = cache.replace(layers=cache.layers + layers, policy=split)
    note(cache)
    return cache, logits, asked


def _upper_capacity(slots: int) -> int:
    """Slots above the watershed, of the staging buffer too: at least so many that short conversations have one size."""
    return max(MEDIUM, prompt_bucket(slots))


def _sizes(
    config: ModelConfig,
    below: int,
    needed: Callable[[SplitCache, int], int],
    limit: int | None,
    lower: int,
    upper: int,
    held: int,
    spare: int,
) -> tuple[int, SplitCache]:
    """Slots to allocate below the watershed, and a split cache, for rows of so many slots below and above it.

    Below it is as it is (``held``) while that suffices, else there are ``spare`` slots for later turns; above it few
    sizes serve all turns. Where that needs more bytes than the limit, it is exact.
    """
    most = max(prompt_bucket(lower), prompt_bucket(config.max_position))
    room = held if lower <= held else min(request_bucket(lower + spare), most)
    split = SplitCache(below, _upper_capacity(upper))
    if limit is None or needed(split, room) <= limit:
        return room, split
    return held if lower <= held else prompt_bucket(lower), SplitCache(below, prompt_bucket(upper))


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
    """Which of the row's rounds, or which of their tokens, a question with this attention selects."""
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
    room = _upper_capacity(max(ends, int(slots.max()) + tokens))
    return programs.stage(uploads, (layers, 2, batch, heads, room, config.head_dim), dtype, x)


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
            f"{what} {human_bytes(need)} with the weights{each} and the device has {human_bytes(limit)}; {would}."
        )
