"""The end of a turn: the new round's upper layers go to host memory, and those it had selected are freed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvjax.cache.buckets import SHORT, prompt_bucket, request_bucket, slots_of
from kvjax.cache.cache import Cache
from kvjax.cache.continuation import delete
from kvjax.cache.host_memory import as_numpy, to_host
from kvjax.model.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.split_cache import SplitCache
from kvjax.rounds.conversation import Conversation, Round
from kvjax.rounds.round_programs import ONE_DEVICE, RoundPrograms, RoundSlice
from kvjax.rounds.turn import PendingTurn, Selection
from kvjax.runtime.prefill_batches import Note, unheard


def close_round(
    params: Decoder,
    asked: PendingTurn,
    cache: Cache,
    ids: Sequence[Sequence[int]],
    bounds: Sequence[Sequence[int]] | None = None,
    programs: RoundPrograms = ONE_DEVICE,
    note: Note = unheard,
) -> Conversation:
    """The conversation after a turn: the new round's upper layers in host memory, and no others' on the device.

    Args:
      asked: from :func:`read_question`.
      cache: as decoding left it; its upper layers are freed. It may have rows of padding last, which the lower layers
        then still have.
      ids: of each row, the tokens it was fed in this turn.
      bounds: of each row, positions at which further rounds begin within what was read, for a history that is read at
        once; by default it is one round.
      note: told of the newest cache after every program.
    """
    config, policy, real = params.config, asked.policy, len(ids)
    below, batch = policy.layers_below(config), cache.batch
    seen = as_numpy(cache.seen)
    edges = [[int(asked.start[row]), *(bounds[row] if bounds else ()), int(seen[row])] for row in range(real)]
    held = np.zeros((max(map(len, edges)) - 1, config.num_layers, batch, config.num_kv_heads), np.int32)
    for row, places in enumerate(edges):
        held[: len(places) - 1, :, row] = np.diff(places)[:, None, None]
    if policy.inner is not None:
        if len(held) > 1:
            raise ValueError("an inner policy compresses a round when it ends, so rounds are read one by one")
        cache = _compress(params, policy.inner, cache, asked.base, held[0, 0, :, 0], ids, programs)
        note(cache)
        now = np.stack([as_numpy(layer.length) for layer in cache.layers])
        held[0, :, :real] = (now - asked.base)[:, :real]
    starts = asked.base + np.concatenate([np.zeros_like(held[:1]), np.cumsum(held, axis=0)])[:-1]
    places = [(row, i) for row in range(real) for i in range(len(edges[row]) - 1) if edges[row][i + 1] > edges[row][i]]
    # One by one: cut out all at once, a history's rounds would be on the device twice.
    away = []
    for row, i in places:
        (upper,) = programs.cut(cache, below, [_slice(row, starts[i][below:, row], held[i][below:, row])])
        note(cache)
        away.append(to_host(upper))
        del upper
    before = asked.before.asked if asked.before is not None else (0,) * real
    questions = tuple(before[row] + len(edges[row]) - 1 for row in range(real))
    added: list[list[Round]] = [[] for _ in range(real)]
    for (row, i), upper in zip(places, away, strict=True):
        first, last = edges[row][i : i + 2]
        # Rounds of a history were all in use until its end: no question has left one out yet.
        added[row].append(Round(first, last - first, held[i][:, row], upper, questions[row]))
    lower = cache.replace(layers=cache.layers[:below], policy=SplitCache(below))
    if asked.before is None:
        prefix = _prefixes(cache, below, asked.base[:, :real], programs)
        delete(cache.replace(layers=cache.layers[below:]))
        return Conversation(lower, prefix, tuple(map(tuple, added)), questions, policy)
    delete(cache.replace(layers=cache.layers[below:]))
    rounds = tuple(
        (*_used(asked.before.rounds[row], asked.choices[row], questions[row]), *added[row]) for row in range(real)
    )
    after = asked.before.records(range(real)).replace(lower=lower, rounds=rounds, asked=questions)
    if policy.drop_after is not None:
        after = after.without_idle(policy.drop_after, programs.delete)
        note(after.lower)
    return after


def _compress(
    params: Decoder,
    inner: Policy,
    cache: Cache,
    base: Int[np.ndarray, "L B H"],
    count: Int[np.ndarray, " B"],
    ids: Sequence[Sequence[int]],
    programs: RoundPrograms,
) -> Cache:
    """The last ``count`` tokens of each row, which follow ``base`` slots, compressed by themselves.

    ``ids``: the tokens each row was fed last, at least as many as the policy's window.
    """
    size = request_bucket(max(int(count.max()), 1))
    window = inner.signals.window_rows(size) if inner.signals.window else 0
    rows = [count.astype(np.int32)]
    if window:
        again = np.minimum(rows[0], window)
        tokens = np.zeros((len(count), window), np.int32)
        for row, fed in enumerate(ids):
            tokens[row, : again[row]] = fed[len(fed) - again[row] :]
        rows += [tokens, again]
    return programs.compress(params, cache, base, rows, inner=inner, size=size)


def _used(rounds: Sequence[Round], choice: Selection, question: int) -> list[Round]:
    chosen = set(choice.selected)
    return [dataclasses.replace(part, used=question) if i in chosen else part for i, part in enumerate(rounds)]


def _slice(row: int, start: Int[np.ndarray, "L H"], held: Int[np.ndarray, "L H"], exact: bool = False) -> RoundSlice:
    longest = max(int(held.max()), 1)
    return RoundSlice(row, start, held, slots_of(longest) if exact else max(SHORT, prompt_bucket(longest)))


def _prefixes(cache: Cache, below: int, held: Int[np.ndarray, "L B H"], programs: RoundPrograms) -> tuple[Round, ...]:
    """The tokens of each row that belong to no round; their upper layers stay on the device."""
    rows = range(held.shape[1])
    slices = [_slice(row, np.zeros_like(held[below:, row]), held[below:, row], exact=True) for row in rows]
    found = programs.cut(cache, below, slices)
    return tuple(Round(0, int(held[:, row].max()), held[:, row], found[row], 0) for row in rows)
