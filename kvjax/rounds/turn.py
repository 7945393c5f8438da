"""One turn of a conversation of rounds, from its question to its round in host memory (section 3.2, algorithm 1).

:func:`read_question`: the question goes through the layers below the watershed (step 2), its attention there selects
rounds, those come to the device in one transfer (step 3), and the other layers read it with them (step 4). What it
leaves is an ordinary cache, which the decode loop takes over (step 5). :func:`close_round` then sends the new round's
upper layers to the host and drops the transient ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.pool import layout_for
from kvjax.cache.storage import Storage
from kvjax.cache.value import Cache
from kvjax.config import ModelConfig
from kvjax.errors import DoesNotFit
from kvjax.model.decoder import Decoder
from kvjax.planning import cache_bytes, device_limit, human
from kvjax.policies.base import page_capacities
from kvjax.policies.rounds import RoundAttention
from kvjax.rounds import programs
from kvjax.rounds.choose import normalised, round_attention, select
from kvjax.rounds.inner import compress_round
from kvjax.rounds.memory import committed, nbytes, to_device, to_host
from kvjax.rounds.placed import Placed
from kvjax.rounds.value import Conversation, Round, UpperRows
from kvjax.runtime.buckets import NEW_TOKENS, prompt_bucket, slots_of


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """What one row's question selected.

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
class Asked:
    """A question that has been read: what closing its round needs.

    Attributes:
      before: the conversation it was asked in, or None for the first question.
      policy, storage: as of the conversation.
      start: [B] position of the round's first token.
      base: [L, B, H] slots before the round's own.
      choices: of each row; empty for the first question.
      moved: bytes that came from the host for all rows.
    """

    before: Conversation | None
    policy: RoundAttention
    start: Int[np.ndarray, " B"]
    base: Int[np.ndarray, "L B H"]
    choices: tuple[Choice, ...]
    moved: int

    def take(self, indices: Sequence[int]) -> Asked:
        """Rows in the given order; several samples of a row share what it selected."""
        index = list(indices)
        return dataclasses.replace(
            self,
            before=None if self.before is None else self.before.take(index),
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
    opening: Sequence[int],
    consume: bool,
    dtype: Any,
    storage: Storage,
    memory_limit: int | None,
) -> tuple[Cache, jax.Array, Asked]:
    """Read a question a row, on what it selects of its conversation.

    Args:
      opening: of a first question, how many of its tokens belong to no round.
      consume: donate the buffers of ``before``.

    Returns:
      A cache of all layers to decode on, the logits [B, V] after each question, and what :func:`close_round` needs.

    Raises:
      DoesNotFit: the selected rounds are too large for the device; the conversation is as it was, unless consumed.
    """
    config, below = params.config, policy.layers_below(params.config)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), prompt_bucket(int(lengths.max()))), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    given = jnp.asarray(tokens), jnp.asarray(lengths)
    kinds = {"dtype": dtype, "storage": storage}
    if before is None:
        room = prompt_bucket(int(lengths.max()))
        pages = _pages(config, Placed(below, room), room, storage)
        cache, x = programs.lower_fresh(
            params, *given, policy=Placed(below), pages=pages[:below], room=room, new_room=NEW_TOKENS, **kinds
        )
        cache, x = committed((cache, x))
        base = np.broadcast_to(np.asarray(opening)[:, None], (config.num_layers, len(prompts), config.num_kv_heads))
        asked = Asked(None, policy, np.asarray(opening), base, (), 0)
        staged = (None, None, None)
        upper_room = room
    else:
        slots = np.stack([before.slots(row)[-1] for row in range(before.batch)], axis=1)
        room = prompt_bucket(int((slots[:below].max(axis=(0, 2)) + lengths).max()))
        pages = _pages(config, Placed(below), room, storage)
        rooms = {"pages": pages[:below], "room": room, "new_room": NEW_TOKENS}
        seen = np.asarray(before.seen)
        cache, x, mass = programs.lower_onto(params, before.lower, *given, consume=consume, **rooms)
        mass = np.asarray(mass)
        choices = tuple(_choose(policy, before, row, mass[row], below) for row in range(before.batch))
        slots[below:] = np.stack([_placed_slots(before, row, choices[row], below) for row in range(before.batch)], 1)
        upper_room = prompt_bucket(int((slots[below:].max(axis=(0, 2)) + lengths).max()))
        _check_fits(params, Placed(below, upper_room), len(prompts), room, dtype, storage, memory_limit)
        staged, moved = _bring(config, before, choices, slots[below:], tokens.shape[1], dtype)
        asked = Asked(before, policy, seen, slots, choices, moved)
    placed = Placed(below, upper_room)
    layers, logits = programs.upper(
        params,
        x,
        cache.seen - given[1],
        given[1],
        *staged,
        policy=placed,
        pages=_pages(config, placed, room, storage)[below:],
        **kinds,
    )
    return cache.replace(layers=cache.layers + layers, policy=placed), logits, asked


def _pages(config: ModelConfig, placed: Placed, room: int, storage: Storage) -> tuple[tuple[int, ...], ...]:
    return page_capacities(placed, config, room, NEW_TOKENS, layout_for(storage, config.head_dim).page_size)


def _choose(
    policy: RoundAttention, before: Conversation, row: int, mass: Float[np.ndarray, "H C"], below: int
) -> Choice:
    """Which of the row's rounds, or which of their tokens, a question with this attention selects."""
    rounds = before.rounds[row]
    edges = before.slots(row)[1:, below - 1]
    attention = round_attention(mass, edges[:-1], edges[1:])
    if policy.granularity == "round":
        selected = tuple(int(i) for i in np.flatnonzero(select(policy, attention)))
        parts = tuple((rounds[i].upper, rounds[i].held[below:]) for i in selected)
        return Choice(attention, selected, sum(rounds[i].tokens for i in selected), parts)
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
    return Choice(attention, tuple(selected), int(keep.sum()), tuple(parts))


def _tokens_of(upper: UpperRows, index: Int[np.ndarray, " N"]) -> UpperRows:
    """Some tokens of a round, gathered on the host so that nothing else travels."""
    padded = np.pad(index, (0, prompt_bucket(len(index)) - len(index)))
    v_scale = upper.v_scale

    def gathered(x: Array, axis: int) -> Array:
        return jax.device_put(np.take(np.asarray(x), padded, axis=axis), x.sharding)

    return dataclasses.replace(
        upper, kv=gathered(upper.kv, 3), v_scale=None if v_scale is None else gathered(v_scale, 2)
    )


def _placed_slots(before: Conversation, row: int, choice: Choice, below: int) -> Int[np.ndarray, "L H"]:
    """Slots of the opening and of what was selected, above the watershed."""
    return before.opening[row].held[below:] + sum(held for _, held in choice.parts)


def _bring(
    config: ModelConfig,
    before: Conversation,
    choices: Sequence[Choice],
    slots: Int[np.ndarray, "L B H"],
    tokens: int,
    dtype: Any,
) -> tuple[tuple[Any, Any, Any], int]:
    """The openings and the selected rounds as staged rows, their lengths and key scales; and the bytes that moved."""
    layers, batch, heads = slots.shape
    pieces, offsets = [], []
    for row, choice in enumerate(choices):
        opening = before.opening[row]
        offset = np.zeros((layers, heads), np.int32)
        for upper, held in ((opening.upper, opening.held[-layers:]), *choice.parts):
            pieces.append((row, upper))
            offsets.append(offset)
            offset = offset + held
    ends = [int(offset.max()) + upper.kv.shape[3] for offset, (_, upper) in zip(offsets, pieces, strict=True)]
    room = prompt_bucket(max(max(ends), int(slots.max()) + tokens))
    quantised = pieces[0][1].k_scale is not None
    k_scale = None
    if quantised:
        scales = np.zeros((layers, batch, heads, config.head_dim), np.float32)
        for row, upper in pieces:
            np.maximum(scales[:, row], np.asarray(upper.k_scale), out=scales[:, row])
        k_scale = jnp.asarray(scales)
    moved = sum(nbytes(upper) for choice in choices for upper, _ in choice.parts)
    # The one transfer of the question: whole rounds, all rows together.
    there = to_device([upper for _, upper in pieces])
    shape = (layers, 2, batch, heads, room, config.head_dim)
    staged = committed(jnp.zeros(shape, jnp.float32 if quantised else dtype))
    for (row, _), upper, offset in zip(pieces, there, offsets, strict=True):
        alike = (offset == offset[0, 0]).all()
        staged = programs.place(staged, upper, np.int32(row), offset[:1, :1] if alike else offset)
    return (staged, jnp.asarray(slots), k_scale), moved


def _check_fits(
    params: Decoder, placed: Placed, batch: int, room: int, dtype: Any, storage: Storage, memory_limit: int | None
) -> None:
    limit = device_limit(memory_limit)
    if limit is None:
        return
    need = nbytes(params) + cache_bytes(params.config, placed, batch, room, NEW_TOKENS, dtype, storage)
    if need > limit:
        raise DoesNotFit(
            f"The rounds this question selects make {human(need)} with the weights and the device has {human(limit)}; "
            "a smaller top, a higher threshold, or an inner policy would bring less."
        )


def close_round(
    params: Decoder,
    asked: Asked,
    cache: Cache,
    ids: Sequence[Sequence[int]],
    bounds: Sequence[Sequence[int]] | None = None,
) -> Conversation:
    """The conversation after a turn: the new round's upper layers in host memory, and no others' on the device.

    Args:
      asked: from :func:`read_question`. cache: what decoding left.
      ids: of each row, the tokens it was fed in this turn.
      bounds: of each row, positions at which further rounds begin within what was read, for a history that is read at
        once; by default it is one round.
    """
    config, policy = params.config, asked.policy
    below, batch = policy.layers_below(config), cache.batch
    seen = np.asarray(cache.seen)
    edges = [[int(asked.start[row]), *(bounds[row] if bounds else ()), int(seen[row])] for row in range(batch)]
    held = np.zeros((max(map(len, edges)) - 1, config.num_layers, batch, config.num_kv_heads), np.int32)
    for row, places in enumerate(edges):
        held[: len(places) - 1, :, row] = np.diff(places)[:, None, None]
    if policy.inner is not None:
        if len(held) > 1:
            raise ValueError("an inner policy compresses a round when it ends, so rounds are read one by one")
        cache, compressed = compress_round(params, policy.inner, cache, asked.base, held[0, 0, :, 0], ids)
        held = compressed[None].astype(np.int32)
    starts = asked.base + np.concatenate([np.zeros_like(held[:1]), np.cumsum(held, axis=0)])[:-1]
    cuts = [
        (row, i, _cut(cache, below, row, starts[i][below:, row], held[i][below:, row]))
        for row, places in enumerate(edges)
        for i in range(len(places) - 1)
        if places[i + 1] > places[i]
    ]
    away = to_host([upper for _, _, upper in cuts])
    before = asked.before.asked if asked.before is not None else (0,) * batch
    added: list[list[Round]] = [[] for _ in range(batch)]
    for (row, i, _), upper in zip(cuts, away, strict=True):
        first, last = edges[row][i : i + 2]
        added[row].append(Round(first, last - first, held[i][:, row], upper, before[row] + 1 + i))
    questions = tuple(count + len(places) - 1 for count, places in zip(before, edges, strict=True))
    lower = cache.replace(layers=cache.layers[:below], policy=Placed(below))
    if asked.before is None:
        opening = tuple(_opening(cache, below, row, asked.base[:, row]) for row in range(batch))
        return Conversation(lower, opening, tuple(map(tuple, added)), questions, policy)
    rounds = tuple(
        (*_used(asked.before.rounds[row], asked.choices[row], questions[row]), *added[row]) for row in range(batch)
    )
    after = asked.before.replace(lower=lower, rounds=rounds, asked=questions)
    return after if policy.drop_after is None else after.without_idle(policy.drop_after)


def _used(rounds: Sequence[Round], choice: Choice, question: int) -> list[Round]:
    chosen = set(choice.selected)
    return [dataclasses.replace(part, used=question) if i in chosen else part for i, part in enumerate(rounds)]


def _cut(
    cache: Cache, below: int, row: int, start: Int[np.ndarray, "L H"], held: Int[np.ndarray, "L H"], exact: bool = False
) -> UpperRows:
    longest = max(int(held.max()), 1)
    size = slots_of(longest) if exact else prompt_bucket(longest)
    return programs.cut(cache.layers[below:], np.int32(row), start, held, size=size)


def _opening(cache: Cache, below: int, row: int, held: Int[np.ndarray, "L H"]) -> Round:
    """What belongs to no round; its upper layers stay on the device."""
    upper = _cut(cache, below, row, np.zeros_like(held[below:]), held[below:], exact=True)
    return Round(0, int(held.max()), held, upper, 0)
