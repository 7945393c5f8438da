"""A context that all requests of an engine go on with: read before, and shared by its slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.allocation import Allocation
from kvjax.cache.buckets import prompt_bucket
from kvjax.cache.cache import Cache, copied
from kvjax.cache.continuation import check_continuable
from kvjax.cache.groups import parts, with_parts
from kvjax.cache.host_memory import as_numpy, device_bytes, to_device
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.errors import UsageError, kind_of
from kvjax.given_caches import how_to_continue
from kvjax.model.config import ModelConfig
from kvjax.options import GenerationOptions
from kvjax.policies import format_policy
from kvjax.policies.composition import shares
from kvjax.runtime.programs import Programs
from kvjax.sharding.adopt import adopt


@dataclasses.dataclass(frozen=True)
class CommonContext:
    """A row that every request begins as.

    Attributes:
      row: of a batch of 1, with what is shared and what each row has for itself of it.
      seen, shared: tokens it has seen, and those of them before what it has for itself.
      nbytes: of what is shared, on the device.
    """

    row: Cache
    seen: int
    shared: int
    nbytes: int

    def own_capacity(self, prompt_tokens: int) -> int:
        """Tokens beyond what is shared that a slot for prompts of ``prompt_tokens`` has capacity for."""
        return prompt_bucket(self.seen - self.shared + prompt_tokens)

    def with_capacity(self, size: Allocation) -> Cache:
        """The row, onto which prompts are read for slots of these sizes."""
        return self.row.replace(prompt_capacity=size.prompt_capacity, own_capacity=size.own_capacity)


def sharing(empty: Cache, row: Cache, config: ModelConfig) -> Cache:
    """An empty cache of slots whose rows share the context of ``row``."""
    assert row.context is not None
    layers = []
    for i, (layer, shared) in enumerate(zip(empty.layers, row.shared_layers, strict=True)):
        pools = []
        for pool, one, (owner, _) in zip(parts(layer), shared, row.policy.pool_policies(config, i), strict=True):
            if one is not None:
                counts = jnp.broadcast_to(one.length, pool.length.shape)
                pool = pool.replace(state=owner.beyond_shared(pool.state, counts))
            pools.append(pool)
        layers.append(with_parts(layer, pools))
    return empty.replace(layers=tuple(layers), context=row.context)


def check_common(cache: Any) -> None:
    """Refuse (UsageError) what is not one cache, or was consumed."""
    if isinstance(cache, (list, tuple)):
        raise UsageError(f"context= takes one cache, and {kind_of(cache)} was given.")
    check_continuable("context=", [cache], one=True)


def common_context(lm: LanguageModel, cache: Any) -> CommonContext:
    """The part of a cache that an engine's slots share, on the model's devices; the cache stays a value.

    Raises:
      UsageError: it is of several rows, another model, or a policy under which every question has a copy.
    """
    check_model(lm)
    check_common(cache)
    how_to_continue(lm, GenerationOptions(), cache)  # of the same model
    policy, storage = cache.policy, cache.storage
    if cache.batch != 1:
        raise UsageError(f"The context has {cache.batch} rows; give one, such as cache.row(0).")
    if policy.offloads_rounds:
        raise UsageError(
            f"{format_policy(policy)} keeps rounds of each conversation, which an engine's slots do not share; use it "
            "with kvjax.generate or kvjax.Chat."
        )
    if not shares(policy, storage):
        raise UsageError(
            f"Under {format_policy(policy)} as {storage.kind} every question has a copy of its context; read it with "
            "once=True, or submit requests with cache=."
        )
    held: Cache = adopt(to_device(cache.device_layers), lm.mesh, lm.config)
    programs = Programs(lm.mesh, lm.config)
    sizes = {"config": lm.config, "prompt_capacity": prompt_bucket(int(as_numpy(held.seen)[0]))}
    if held.context is None and policy.chosen_once:  # it was saved
        held = programs.share_chosen(held, dtype=lm.params.dtype, **sizes)
    elif held.context is None:
        held = programs.share(held, 1, **sizes)
    else:  # what is the row's own is copied, so that a turn may consume the cache while the engine runs
        held = copied(held, [0])
    assert held.context is not None
    seen, shared = (int(as_numpy(each)[0]) for each in (held.seen, held.context.seen))
    return CommonContext(held, seen, shared, device_bytes(jax.tree.leaves(held.context)))
