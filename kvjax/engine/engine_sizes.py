"""The sizes of an engine's slots, planned once: bytes of everything that it will ever allocate, before it does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from kvjax.allocation import Allocation, beside_context, spare_tokens
from kvjax.cache.buckets import (
    ACCELERATOR_BLOCK,
    MEDIUM,
    NEW_TOKENS,
    SHORT,
    block_of,
    prompt_bucket,
    request_bucket,
)
from kvjax.cache.quantisation import Storage
from kvjax.device_memory import device_limit
from kvjax.engine.common_context import CommonContext
from kvjax.engine.levels import has_levels
from kvjax.errors import DoesNotFit, UsageError
from kvjax.halving import largest
from kvjax.memory_needs import cache_bytes, prefill_bytes, shared_context_bytes, shared_copy_bytes, weights_bytes
from kvjax.model.config import ModelConfig
from kvjax.policies import Policy
from kvjax.policies.guard import check_sizes
from kvjax.sharding.mesh import Mesh
from kvjax.tables import counted, human_bytes
from pallas_kernels import dispatch

#: Slots where nothing says how many fit.
_USUAL_SLOTS = 8
#: Slots at most where the memory says how many fit.
MOST_SLOTS = 256
#: Arrays of a step's logits that sampling may hold at a time.
_LOGITS = 3


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """An engine's allocation, and the bytes it takes on each device.

    Attributes:
      slots: rows of the batch. prompt_capacity, new_capacity: of each, as for any cache; beside the context that all
        slots share.
      allocation: the sizes of every cache that goes into a slot.
      weights_bytes, slots_bytes: the model, and the caches of all slots.
      prefill_cache_bytes: the caches of the rows that are being read, until they are in their slots: a long prompt's,
        those of short ones that are read meanwhile, and one context's, which is kept.
      context_bytes: what all slots share.
      working_bytes: the most that reading them, the logits of a step, or moving the slots to larger ones needs beside;
        of reading an estimate from shapes.
    """

    slots: int
    prompt_capacity: int
    new_capacity: int
    weights_bytes: int
    slots_bytes: int
    prefill_cache_bytes: int
    working_bytes: int
    allocation: Allocation
    context_bytes: int = 0
    context: int = 0

    @property
    def total_bytes(self) -> int:
        held = self.weights_bytes + self.slots_bytes + self.context_bytes
        return held + self.prefill_cache_bytes + self.working_bytes

    @property
    def own_capacity(self) -> int | None:
        """Tokens of prompt beyond what is shared, None where nothing is."""
        return self.allocation.own_capacity


def read_together(bucket: int, slots: int) -> int:
    """Prompts of a bucket that one program reads: as many as fill the machine, and no more than there are slots.

    On a CPU one long prompt does, and short ones gain until they are 8; rows of a program that none needs cost packing.
    """
    on_cpu = 8 if bucket <= SHORT else 1
    most = on_cpu if dispatch.platform() == "cpu" else ACCELERATOR_BLOCK // block_of(bucket)
    return max(1, min(most, slots))


def bucket_for(tokens: int, prompt_capacity: int) -> int:
    """The bucket that a prompt is read in: that of a request, and beyond those powers of two, so that they are few."""
    return min(max(request_bucket(tokens), _power(tokens)), max(SHORT, prompt_capacity))


def buckets(prompt_capacity: int) -> list[int]:
    """All buckets of an engine."""
    found, tokens = [], 1
    while not found or found[-1] < prompt_capacity:
        found.append(bucket_for(tokens, prompt_capacity))
        tokens = found[-1] + 1
    return found


def _power(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length() if tokens > MEDIUM else 1


@dataclasses.dataclass(frozen=True)
class _Slots:
    """An engine's slots but for their number, from which its bytes follow.

    Attributes:
      capacity: tokens of prompt that a slot has room for, a bucket. new: tokens that may be decoded after them.
    """

    config: ModelConfig
    policy: Policy
    storage: Storage
    dtype: Any
    mesh: Mesh | None
    context: CommonContext | None
    capacity: int
    new: int

    def sizes(self, count: int) -> EngineSizes:
        """The sizes of an engine of at least ``count`` slots: on a mesh they fill it."""
        config, dtype, mesh, context = self.config, self.dtype, self.mesh, self.context
        rows, data = (count, 1) if mesh is None else (mesh.rows(count), mesh.data)
        groups = {bucket: data * read_together(bucket, rows // data) for bucket in buckets(self.capacity)}
        cache = {n: self._cache_bytes(n) for n in {data, rows, *groups.values()}}
        short, *longer = (groups[bucket] for bucket in sorted(groups))
        # A request may ask for its prompt's log-probabilities, which one program of all layers gives.
        needs = (
            prefill_bytes(config, self.policy, n, bucket, dtype, mesh, in_one=True) for bucket, n in groups.items()
        )
        reading = max(needs)
        if context is not None and self._allocation(rows).own_capacity is not None:
            reading += shared_copy_bytes(config, self.policy, prompt_bucket(context.shared), dtype, self.storage, mesh)
        moving = cache[rows] // 2 + 1 if self._moves else 0
        return EngineSizes(
            slots=rows,
            prompt_capacity=self.capacity,
            new_capacity=self.new,
            weights_bytes=weights_bytes(config, dtype, mesh),
            slots_bytes=cache[rows],
            prefill_cache_bytes=cache[short] + cache[data] + max((cache[n] for n in longer), default=0),
            working_bytes=max(reading, moving, _LOGITS * 4 * rows // data * config.vocab_size),
            allocation=self._allocation(rows),
            context_bytes=0 if context is None else context.nbytes,
            context=0 if context is None else context.seen,
        )

    def _allocation(self, rows: int) -> Allocation:
        """The sizes of a cache of so many slots."""
        if self.context is None:
            return Allocation(rows, self.capacity, self.new)
        own = self.context.own_capacity(self.capacity)
        return beside_context(self.config, self.policy, rows, self.context.shared, own, self.new)

    @functools.cached_property
    def _moves(self) -> bool:
        on_mesh = self.mesh is not None
        return self.context is None and has_levels(self.config, self.policy, self.dtype, self.storage, on_mesh=on_mesh)

    def _cache_bytes(self, rows: int) -> int:
        """Bytes of so many rows' own slots."""
        size, kinds = self._allocation(rows), (self.new, self.dtype, self.storage, self.mesh)
        if self.context is None or size.own_capacity is None:
            return cache_bytes(self.config, self.policy, rows, self.capacity, *kinds)
        shape = prompt_bucket(self.context.shared), size.prompt_capacity, size.own_capacity
        return shared_context_bytes(self.config, self.policy, rows, *shape, *kinds)[0]

    def most(self, limit: int | None, most: int) -> int:
        """The largest number of slots up to ``most`` that fits, or 0."""
        return largest(1, most, lambda count: limit is None or self.sizes(count).total_bytes <= limit)


def engine_sizes(
    config: ModelConfig,
    policy: Policy,
    storage: Storage,
    *,
    slots: int | None,
    most_slots: int = MOST_SLOTS,
    prompt_tokens: int,
    new_tokens: int,
    dtype: Any,
    memory_limit: int | None,
    mesh: Mesh | None,
    context: CommonContext | None = None,
) -> EngineSizes:
    """The sizes of an engine for prompts of ``prompt_tokens`` and answers of ``new_tokens``.

    Args:
      slots: None for as many as the memory limit has room for, up to ``most_slots``, or 8 without one.
      context: what comes before every prompt, where all have the same.

    Raises:
      UsageError: lengths beyond the model's context.
      DoesNotFit: the total exceeds the limit; the sentence says how many slots would fit.
    """
    _check_lengths(config, prompt_tokens, 0 if context is None else context.seen)
    limit, capacity = device_limit(memory_limit), prompt_bucket(prompt_tokens)
    most = new_tokens if policy.beyond_context else min(new_tokens, config.max_position)
    new = NEW_TOKENS if not policy.grows else max(NEW_TOKENS, -(-most // 64) * 64)
    check_sizes(policy, config, capacity, new)
    wanted = _Slots(config, policy, storage, dtype, mesh, context, capacity, new)
    if slots is None:
        slots = max(1, wanted.most(limit, most_slots))
        slots = slots if memory_limit is not None else min(slots, _USUAL_SLOTS)
    made = wanted.sizes(slots)
    if limit is not None and made.total_bytes > limit:
        less = wanted.most(limit, MOST_SLOTS)
        offer = f"{counted(less, 'slot')} would fit" if less else "make prompt_tokens or new_tokens smaller"
        raise DoesNotFit(
            f"An engine of {counted(made.slots, 'slot')} for {prompt_tokens:,} prompt and {new_tokens:,} new tokens "
            f"needs {human_bytes(made.total_bytes)} and the limit is {human_bytes(limit)}; {offer}."
        )
    return made


def _check_lengths(config: ModelConfig, prompt_tokens: int, seen: int) -> None:
    """Refuse (UsageError) prompts that the model's context has no room for after ``seen`` tokens."""
    if seen >= config.max_position:
        raise UsageError(
            f"The context has {seen:,} tokens and this model's is {config.max_position:,}, so no prompt fits after it; "
            "give a shorter one."
        )
    if prompt_tokens > config.max_position - seen:
        beside, most = (f" and {seen:,} of it are taken", f"{config.max_position - seen:,}") if seen else ("", "that")
        raise UsageError(
            f"prompt_tokens is {prompt_tokens:,}; this model's context is {config.max_position:,}{beside}, give at "
            f"most {most}."
        )


def held_after(config: ModelConfig, policy: Policy, tokens: int) -> list[np.ndarray]:
    """Slots that a row holds of each layer's KV heads after a prompt of so many tokens, its first."""
    total = np.array([tokens])
    return [np.asarray(policy.budgets(config, layer, total))[0] for layer in range(config.num_layers)]


def new_tokens_left(config: ModelConfig, policy: Policy, sizes: EngineSizes, held: list[np.ndarray]) -> int:
    """Tokens that a row may generate in its slot, where it holds so many slots after its prompt."""
    if not policy.grows:
        return np.iinfo(np.int32).max
    # The last token is generated and never fed.
    spare = spare_tokens(config, policy, sizes.allocation.prompt_capacity, held, sizes.own_capacity)
    return sizes.new_capacity + spare + 1
