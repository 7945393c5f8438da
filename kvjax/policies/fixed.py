"""A policy that keeps what another chose of a context once, and all that comes after it.

Policies here are of a cache that :func:`kvjax.read` gave with ``once=True``; users name the one that chose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from kvjax.cache.cache import Cache
from kvjax.cache.groups import with_parts
from kvjax.cache.host_memory import as_numpy
from kvjax.cache.pool import LayerCache
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import HostOrTraced, Policy
from kvjax.policies.composed import HeadWise
from kvjax.policies.parsing import format_policy


@dataclasses.dataclass(frozen=True)
class Fixed(Policy):
    """Keep what ``policy`` chose of a context, and every token that is read or decoded after it.

    Its caches always share a context, in which those slots are; rows' own pools hold what comes after it. See
    :func:`kvjax.read` with ``once=True``, which is how KVzip, SnapKV and others are evaluated in their papers: the
    question is not compressed.
    """

    layers_alike: ClassVar[bool] = True

    policy: Policy

    @property
    def named(self) -> Policy:
        return self.policy

    @property
    def chosen_once(self) -> bool:
        return True

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Devices divide the pages of a context whose heads share slots, and rows' own as they do.
        return self.policy.heads_alike and not self.policy.shares_slots

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        return self.policy.capacities(config, prompt, new)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        return self.policy.budgets(config, layer, total)

    def retained_by_layer(self, layers: Sequence[LayerCache]) -> list[HostOrTraced]:
        whole = layers[0].model_layers > 1  # what was saved, until a request shares it
        return self.policy.retained_by_layer(layers) if whole else super().retained_by_layer(layers)

    def own_capacities(self, config: ModelConfig, prompt: int, own: int, new: int) -> tuple[tuple[int, ...], ...]:
        return ((own + new,) * config.num_kv_heads,) * config.num_layers


@dataclasses.dataclass(frozen=True)
class FixedHeads(HeadWise):
    """:class:`Fixed` of a policy that protects some heads: the other heads' policy chooses once."""

    layers_alike: ClassVar[bool] = True

    policy: HeadWise

    @property
    def named(self) -> Policy:
        return self.policy

    @property
    def chosen_once(self) -> bool:
        return True

    def protected(self, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return self.policy.protected(config)

    def others(self, config: ModelConfig) -> Policy:
        return Fixed(self.policy.others(config))

    @property
    def unsized(self) -> Policy:
        return Fixed(self.policy.unsized)


def fixed(policy: Policy) -> Policy:
    """The policy that keeps what this one chooses of a context; itself where that is what it does.

    Raises:
      UsageError: it goes on changing what it chose, or cannot be followed by tokens that are all kept.
    """
    chosen = policy.chosen
    if chosen.chosen_once or (chosen.only_appends and not policy.offloads_rounds):
        return policy
    chooses = chosen.unsized if isinstance(chosen, HeadWise) else chosen
    if policy.offloads_rounds or chooses.changes_while_decoding:
        raise UsageError(
            f"{format_policy(policy)} goes on choosing among the tokens of a context while it answers, so once=True is "
            "not for it; leave it out, or take a policy that chooses when a prompt is read, such as snapkv or kvzip."
        )
    if chooses.merges or (isinstance(chosen, HeadWise) and chosen.whole_layers):
        raise UsageError(
            f"once=True takes a policy that chooses among whole tokens of its heads, and {format_policy(policy)} does "
            "not; leave it out, or take another policy, such as kvzip or adaptive:inner=kvzip."
        )
    return policy.with_chosen(FixedHeads(chosen) if isinstance(chosen, HeadWise) else Fixed(chosen))


def chooser_of(policy: Policy) -> Policy:
    """The policy that chose what a policy of a context that was chosen once keeps: undoes :func:`fixed`."""
    return policy.with_chosen(policy.named)


def materialised_chosen(cache: Cache) -> Cache:
    """A cache that was chosen once, as it was before: what was chosen is in the row's own pools.

    Raises:
      UsageError: something was read onto it.
    """
    context = cache.context
    if context is None:
        return cache
    if cache.batch != 1 or int(as_numpy(cache.seen)[0]) != int(as_numpy(context.seen)[0]):
        raise UsageError(
            "A conversation over a context that was read with once=True is neither saved nor moved to other devices; "
            "save what kvjax.read gave."
        )
    if context.whole is not None:
        return cache.replace(layers=(context.whole,), context=None, own_capacity=None)
    layers = []
    for own, shared in zip(cache.layers, context.layers, strict=True):
        pools = [pool for pool in shared if pool is not None]
        layers.append(with_parts(own, pools) if pools else own)
    return cache.replace(layers=tuple(layers), context=None, own_capacity=None)
