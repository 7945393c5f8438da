"""The sizes that a request is allocated and compiled for: rows of its batch, and tokens that each may hold.

They are few, so that a new request finds its programs compiled; what they are larger than needed is the *spare* of a
plan. A single request takes a bucket of rows and one of tokens (:func:`~kvjax.cache.buckets.batch_bucket`,
:func:`~kvjax.cache.buckets.request_bucket`). A conversation reserves tokens for its later turns: while they last no
turn compiles, and when they are used up its capacity grows by half (:func:`~kvjax.cache.buckets.reserves`). Rows that
share a context have a capacity of their own beside it, in buckets of its own (:func:`~kvjax.cache.buckets.own_bucket`),
and one twice as large when a later turn does not fit. What does not fit the device so is allocated exactly: as many
rows as there are, in the finer buckets of a job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvjax.cache.buckets import (
    NEW_TOKENS,
    RESERVE,
    batch_bucket,
    own_bucket,
    prompt_bucket,
    request_bucket,
    reserves,
)
from kvjax.cache.cache import Cache
from kvjax.model.config import ModelConfig
from kvjax.policies import Policy


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The sizes that a batch's cache is made with.

    Attributes:
      rows: of the batch, those of padding included.
      prompt_capacity: tokens of prompt that each row has room for.
      new_capacity: tokens that may be decoded after them before the pools must grow.
      own_capacity: of ``prompt_capacity``, those that each row has room for beyond a context that rows share; None
        where they share none.
    """

    rows: int
    prompt_capacity: int
    new_capacity: int = NEW_TOKENS
    own_capacity: int | None = None


def allocations(
    config: ModelConfig,
    policy: Policy,
    rows: int,
    tokens: int,
    *,
    reserve: int | None = None,
    held: Cache | None = None,
    context: int | None = None,
    exact: bool = False,
) -> tuple[Allocation, ...]:
    """The sizes that rows may have which will have seen at most ``tokens``, prompts included: most spare first.

    Args:
      reserve: tokens of later turns, over all rows together; None is none of a first turn, and the usual of a later.
      held: what the prompts are read onto; it keeps its sizes while they suffice.
      context: of ``tokens``, the first ones, whose slots all rows share; None where each holds all of its own.
      exact: only the last of them, of no spare but what buckets of tokens have.
    """
    if context is not None:
        return _beside_context(config, policy, rows, tokens, context, reserve, held, exact=exact)
    if held is not None and (tokens <= held.prompt_capacity or not policy.replans):
        kept = dict.fromkeys((rows,) if exact else (batch_bucket(rows), rows))
        return tuple(Allocation(batch, held.prompt_capacity, held.new_capacity) for batch in kept)
    last = Allocation(rows, prompt_bucket(tokens))
    if exact:
        return (last,)
    batch = batch_bucket(rows)
    later = (0 if held is None else RESERVE) if reserve is None else reserve
    found = []
    for spare in reserves(tokens, later // batch, outgrown=held is not None):
        wanted = tokens + spare
        # No row is longer than the context, but for a policy that renumbers positions.
        most = wanted if policy.beyond_context else max(prompt_bucket(tokens), prompt_bucket(config.max_position))
        found.append(Allocation(batch, min(request_bucket(wanted), most)))
    return tuple(dict.fromkeys((*found, last)))


def _beside_context(
    config: ModelConfig,
    policy: Policy,
    rows: int,
    tokens: int,
    context: int,
    reserve: int | None,
    held: Cache | None,
    *,
    exact: bool,
) -> tuple[Allocation, ...]:
    """:func:`allocations` of rows that share their first ``context`` tokens."""
    own, batch = tokens - context, rows if exact else batch_bucket(rows)
    if held is not None and tokens <= held.prompt_capacity and own <= (held.own_capacity or 0):
        sizes = held.prompt_capacity, held.new_capacity, held.own_capacity
        return tuple(Allocation(count, *sizes) for count in dict.fromkeys((batch, rows)))
    last = beside_context(config, policy, rows, context, prompt_bucket(own) if own else 0)
    if exact:
        return (last,)
    if reserve is None:  # twice what a first turn would take, so that few turns outgrow it
        spares: tuple[int, ...] = (0,) if held is None else (own, 0)
    else:
        spares = reserves(own, reserve // batch, outgrown=held is not None)
    wanted = [own + spare for spare in spares]
    capacities = [own_bucket(count) if count else 0 for count in wanted]
    if not policy.beyond_context:  # no row is longer than the context
        most = max(prompt_bucket(own), prompt_bucket(config.max_position - context))
        capacities = [min(capacity, most) for capacity in capacities]
    found = [beside_context(config, policy, batch, context, capacity) for capacity in capacities]
    return tuple(dict.fromkeys((*found, last)))


def beside_context(
    config: ModelConfig, policy: Policy, rows: int, context: int, own: int, new_capacity: int = NEW_TOKENS
) -> Allocation:
    """The sizes of rows with room for ``own`` tokens of prompt each, beside ``context`` tokens that they share."""
    whole = context + own
    if not policy.beyond_context:
        whole = min(whole, max(config.max_position, context))
    return Allocation(rows, prompt_bucket(whole), new_capacity, own)


def spare_beside_context(policy: Policy, own_capacity: int, own: int) -> int:
    """Tokens that may be decoded beside the new capacity, where the longest row has ``own`` beyond a shared context.

    None under a policy that moves or drops some of them: its rows' slots are not counted in tokens.
    """
    return max(own_capacity - own, 0) if policy.chosen_once or policy.only_appends else 0


def spare_tokens(
    config: ModelConfig,
    policy: Policy,
    prompt_capacity: int,
    held: Sequence[Int[np.ndarray, " H"]],
    own_capacity: int | None = None,
) -> int:
    """Tokens that may be decoded beside the new capacity, into what prompts left of theirs.

    Args:
      held: slots of each layer's KV heads that the longest row holds after its prompt, but for those it shares.
      own_capacity: tokens beyond a context that rows share, where they do.
    """
    if own_capacity is None:
        slots = policy.capacities(config, prompt_capacity, 0)
    else:
        slots = policy.own_capacities(config, prompt_capacity, own_capacity, 0)
    free = [
        int(have - count)
        for layer, (haves, counts) in enumerate(zip(slots, held, strict=True))
        for have, count, owner in zip(haves, counts, policy.owners(config, layer), strict=True)
        if owner.grows
    ]
    return max(min(free, default=0), 0)
