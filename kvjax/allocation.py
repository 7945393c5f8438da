"""The sizes that a request is allocated and compiled for: rows of its batch, and tokens that each may hold.

They are few, so that a new request finds its programs compiled; what they are larger than needed is the *spare* of a
plan. A single request takes a bucket of rows and one of tokens (:func:`~kvjax.cache.buckets.batch_bucket`,
:func:`~kvjax.cache.buckets.request_bucket`). A conversation reserves tokens for its later turns: while they last no
turn compiles, and when they are used up the next reserve is as large again. What does not fit the device so is
allocated exactly: as many rows as there are, in the finer buckets of a job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvjax.cache.buckets import NEW_TOKENS, RESERVE, batch_bucket, prompt_bucket, request_bucket
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
    """

    rows: int
    prompt_capacity: int
    new_capacity: int = NEW_TOKENS


def allocation(
    config: ModelConfig,
    policy: Policy,
    rows: int,
    tokens: int,
    *,
    reserve: int | None = None,
    held: Cache | None = None,
    exact: bool = False,
) -> Allocation:
    """The sizes for rows that will have seen at most ``tokens``, prompts included.

    Args:
      reserve: tokens of later turns, over all rows together; None is none of a first turn, and the usual of a later.
      held: what the prompts are read onto; it keeps its sizes while they suffice.
      exact: no spare but what buckets of tokens have.
    """
    batch = rows if exact else batch_bucket(rows)
    if held is not None and (tokens <= held.prompt_capacity or not policy.replans):
        return Allocation(batch, held.prompt_capacity, held.new_capacity)
    if exact:
        return Allocation(batch, prompt_bucket(tokens))
    wanted = tokens + (RESERVE if reserve is None and held is not None else reserve or 0) // batch
    # No row is longer than the context, but for a policy that renumbers positions.
    most = wanted if policy.beyond_context else max(prompt_bucket(tokens), prompt_bucket(config.max_position))
    return Allocation(batch, min(request_bucket(wanted), most))


def spare_tokens(
    config: ModelConfig, policy: Policy, prompt_capacity: int, held: Sequence[Int[np.ndarray, " H"]]
) -> int:
    """Tokens that may be decoded beside the new capacity, into what prompts left of theirs.

    Args:
      held: slots of each layer's KV heads that the longest row holds after its prompt.
    """
    slots = policy.capacities(config, prompt_capacity, 0)
    free = [
        int(have - count)
        for layer, (haves, counts) in enumerate(zip(slots, held, strict=True))
        for have, count, owner in zip(haves, counts, policy.owners(config, layer), strict=True)
        if owner.grows
    ]
    return max(min(free, default=0), 0)
