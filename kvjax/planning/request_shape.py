"""The bytes of a request of given sizes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from kvjax.allocation import Allocation, allocations, spare_beside_context, spare_tokens
from kvjax.cache.buckets import NEW_TOKENS, RESERVE, batch_bucket, new_bucket, prompt_bucket, reserves
from kvjax.cache.cache import Cache
from kvjax.cache.groups import split_heads
from kvjax.cache.pool import layout_for
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.memory_needs import (
    cache_bytes,
    full_cache_bytes,
    prefill_bytes,
    shared_context_bytes,
    shared_copy_bytes,
    weights_bytes,
)
from kvjax.model.config import ModelConfig
from kvjax.planning.result import Plan
from kvjax.policies import Full, Policy, format_policy
from kvjax.policies.composition import shares
from kvjax.policies.fixed import chooser_of
from kvjax.policies.page_capacities import page_capacities
from kvjax.policies.split_cache import slots_above, slots_below
from kvjax.runtime.token_logprobs import scoring_bytes
from kvjax.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestShape:
    """A request as far as its bytes depend on it.

    Attributes:
      batch: rows. prompt: tokens of the longest one, beside ``context`` tokens before all of them, read once.
      new: tokens that are generated.
      limit: bytes of the device, or None where they are not known.
      scored: whether every token of the prompts gets its log-probability.
      held_context: bytes on each device of a context that the rows share already, which stays as it is; None of one
        that is read, or made of a row.
      once: whether what is read becomes, as a copy, a context that is never chosen among again.
    """

    config: ModelConfig
    policy: Policy
    batch: int
    prompt: int
    new: int
    dtype: Any
    limit: int | None = None
    storage: Storage = MODEL
    mesh: Mesh | None = None
    context: int = 0
    scored: bool = False
    held_context: int | None = None
    once: bool = False

    @property
    def whole(self) -> int:
        """Tokens that a row has seen before its first new one."""
        return self.context + self.prompt

    @property
    def fed(self) -> int:
        """Tokens that are decoded into the cache: the last one is generated and never fed; the context bounds them."""
        fed = max(self.new - 1, 0)
        return fed if self.policy.beyond_context else min(fed, self.config.max_position - self.whole)

    @property
    def shares_context(self) -> bool:
        """Whether rows share the slots of a context; a single row begins to only if it was chosen once."""
        several = self.batch > 1 or self.policy.chosen_once or self.held_context is not None
        return bool(self.context) and several and shares(self.policy, self.storage)

    def sizes(self, reserve: int | None, held: Cache | None = None, *, exact: bool) -> tuple[Allocation, ...]:
        """The sizes that the rows may have under a policy of tokens: :func:`kvjax.allocation.allocations`."""
        context = self.context if self.shares_context else None
        more: dict[str, Any] = {"reserve": reserve, "held": held, "context": context, "exact": exact}
        return allocations(self.config, self.policy, self.batch, self.whole, **more)

    def first_size(self, reserve: int | None, *, exact: bool) -> Allocation:
        """The sizes of prompts that nothing but a context is before; a context of rounds is a turn of its own.

        ``reserve``: tokens of later turns, over all rows together. ``exact``: no spare but what buckets of tokens have.
        """
        config, policy, batch = self.config, self.policy, self.batch
        if not policy.offloads_rounds:
            return self.sizes(reserve, exact=exact)[0]
        held = slots_below(config, self.context, spare=reserve or 0, exact=exact) if self.context else 0
        rows = batch if exact else batch_bucket(batch)
        later = (RESERVE if reserve is None and self.context else reserve or 0) // rows
        spare = reserves(self.whole, later, outgrown=bool(held))[0]
        return Allocation(rows, slots_below(config, self.whole, held=held, spare=spare, exact=exact))

    def first_plan(self, reserve: int | None, *, exact: bool) -> Plan:
        """The plan of prompts that nothing but a context is before, sizes as :meth:`first_size`."""
        size = self.first_size(reserve, exact=exact)
        lasting = bool(self.context or reserve)
        above = slots_above(self.config, self.whole, lasting=lasting, exact=exact)
        made = self.plan(size, self.policy.reading(self.config, above))
        if not self.policy.offloads_rounds:
            return made
        return dataclasses.replace(made, later_bytes=self._later_bytes(size))

    def _later_bytes(self, size: Allocation) -> int:
        """Bytes of the cache while a later question is answered in a conversation of as many tokens."""
        selected = self.policy.answering(self.config, self.whole).capacities(self.config, 0, 0)[-1][0]
        placed = self.policy.reading(self.config, slots_above(self.config, selected))
        capacities = size.rows, size.prompt_capacity, NEW_TOKENS
        return cache_bytes(self.config, placed, *capacities, self.dtype, self.storage, self.mesh)

    def plan(self, size: Allocation, placed: Policy | None = None) -> Plan:
        """The plan of these sizes; ``placed`` has the capacities, by default those while a later turn is answered."""
        config, policy, storage, mesh = self.config, self.policy, self.storage, self.mesh
        held = placed or policy.answering(config, size.prompt_capacity)
        kept = self._kept(policy if placed is None or placed is policy else Full())
        new_capacity = max(size.new_capacity, self._new_capacity(held, size, kept))
        least = policy.answering(config, self.whole) if placed is None else policy.reading(config, self.whole)
        found = self._bytes(size, new_capacity, held, least)
        peak = found.peak + (scoring_bytes(size.rows, config.vocab_size) if self.scored else 0)
        weights, devices = weights_bytes(config, self.dtype, mesh), 1 if mesh is None else mesh.size
        full = self.batch * full_cache_bytes(config, self.whole + self.fed, self.dtype) // devices
        page_size = layout_for(storage, config.head_dim).page_size
        pages = page_capacities(held, config, size.prompt_capacity, new_capacity, page_size, size.own_capacity)
        layers = config.num_layers // len(pages)  # more than one where all share their slots
        slots = [heads for counts in pages for heads in split_heads(counts, layers)]
        return Plan(
            policy=format_policy(policy),
            batch=self.batch,
            prompt_tokens=self.prompt,
            max_new_tokens=self.new,
            weights_bytes=weights,
            cache_bytes=found.cache,
            prefill_peak_bytes=peak,
            full_cache_bytes=full,
            total_bytes=weights + found.cache + peak,
            memory_limit=self.limit,
            capacities=tuple(tuple(count * page_size for count in heads) for heads in slots),
            retained=tuple(tuple(int(x) for x in heads) for heads in kept),
            mesh=None if mesh is None else str(mesh),
            cache_over_even=found.cache * devices / found.alone,
            spare_bytes=max(found.cache - found.needed, 0),
            context_tokens=self.context,
            shares_context=shares(policy, storage),
            context_bytes=found.context,
            windows=config.windows_by_layer,
            notice=self._notice(),
            rows=size.rows if mesh is None else mesh.rows(size.rows),
        )

    def _kept(self, policy: Policy) -> list[np.ndarray]:
        """Tokens that the heads of each layer hold once the prompt is read, [H] by layer."""
        found = []
        for layer in range(self.config.num_layers):
            # What is chosen once is chosen among the context alone, and the rest is kept.
            chosen_once = policy.part(self.config, layer)[0].chosen_once
            total = np.array([self.context if chosen_once else self.whole])
            found.append(np.asarray(policy.budgets(self.config, layer, total))[0] + (self.prompt if chosen_once else 0))
        return found

    def _new_capacity(self, held: Policy, size: Allocation, kept: list[np.ndarray]) -> int:
        """Slots for decoded tokens when the last one is fed."""
        if not self.policy.grows or self.fed <= NEW_TOKENS:
            return NEW_TOKENS
        if size.own_capacity is None:
            spare = spare_tokens(self.config, held, size.prompt_capacity, kept)
        else:
            spare = spare_beside_context(held, size.own_capacity, self.prompt)
        return new_bucket(self.fed - 1 - spare, self.config.max_position)

    def _bytes(self, size: Allocation, new_capacity: int, held: Policy, least: Policy) -> _Bytes:
        """Bytes of a cache with the capacities of ``held``, of which ``least`` has those that are needed."""
        config, policy, dtype, storage, mesh = self.config, self.policy, self.dtype, self.storage, self.mesh
        fed = max(self.fed, 1)
        if size.own_capacity is None:
            alone = cache_bytes(config, held, size.rows, size.prompt_capacity, new_capacity, dtype, storage)
            cache = cache_bytes(config, held, size.rows, size.prompt_capacity, new_capacity, dtype, storage, mesh)
            peak = prefill_bytes(config, policy, size.rows, self.whole, dtype, mesh, in_one=self.scored)
            return _Bytes(
                cache=cache,
                alone=alone,
                needed=cache_bytes(config, least, self.batch, self.whole, fed, dtype, storage, mesh),
                peak=max(peak, cache) if self.once else peak,
            )
        bucket = prompt_bucket(self.context)
        shape = size.rows, bucket, size.prompt_capacity, size.own_capacity, new_capacity, dtype, storage
        least_shape = self.batch, self.context, self.whole, self.prompt, fed, dtype, storage
        own, shared = shared_context_bytes(config, policy, *shape, mesh)
        needed, shared_needed = shared_context_bytes(config, policy, *least_shape, mesh)
        # The context is read by itself, and then attended to from rows of one layer of it at a time.
        read = prefill_bytes(config, policy, 1, self.context, dtype, mesh, in_one=self.scored)
        if policy.chosen_once:  # of what was chosen it is a copy
            read = max(read, cache_bytes(config, chooser_of(policy), 1, bucket, NEW_TOKENS, dtype, storage, mesh))
        if self.held_context is not None:
            shared, shared_needed, read = self.held_context, self.held_context, 0
        of_prompts = prefill_bytes(config, policy, size.rows, self.prompt, dtype, mesh, in_one=self.scored)
        of_prompts += shared_copy_bytes(config, policy, bucket, dtype, storage, mesh)
        alone = sum(shared_context_bytes(config, policy, *shape))
        return _Bytes(own + shared, alone, needed + shared_needed, max(read, of_prompts), shared)

    def _notice(self) -> str | None:
        """A note where the policy fails prompts of this length, or the context ends before the answer does."""
        lines = [self.policy.notice(self.config, self.whole)]
        if self.fed < self.new - 1:
            most = self.config.max_position
            lines.append(f"The model's context of {most:,} tokens has room for {self.fed + 1:,} new.")
        return " ".join(line for line in lines if line is not None) or None


class _Bytes(NamedTuple):
    """Bytes of a request on each device.

    Attributes:
      cache: as allocated. alone: that of one device alone. needed: of ``cache``, without what is spare.
      peak: of prefill. context: of ``cache``, what rows share.
    """

    cache: int
    alone: int
    needed: int
    peak: int
    context: int = 0
