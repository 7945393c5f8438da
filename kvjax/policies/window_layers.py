"""Models with sliding-window layers: rings of their tokens, and the policy for the global layers alone.

A query of a layer with a window of W tokens sees the last W, so its cache is a ring of W slots and nothing is left to
choose. :func:`for_model` puts these rings beside a policy; what the policy itself is given is a model of the global
layers alone, so that its budgets, its layer numbers and its profiles count these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.groups import Layer
from kvjax.cache.packing import store
from kvjax.cache.pool import LayerCache, keys_and_values
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import (
    HostOrTraced,
    Policy,
    PromptChunk,
    Signals,
    Step,
    append_new,
    gather_candidates,
    numpy_or_jax,
    per_head,
)
from kvjax.policies.full import Full


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Policy):
    """A ring of the last ``window`` tokens, which are all that a query of a sliding-window layer sees.

    Between prompts the slot ``next`` of a full ring holds the oldest token; :meth:`sort_slots` moves it to the front.
    """

    layers_alike: ClassVar[bool] = True
    grows: ClassVar[bool] = False
    replans: ClassVar[bool] = False

    window: int = 4096

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        return ((self.window,) * config.num_kv_heads,) * config.num_layers

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        return per_head(numpy_or_jax(total).minimum(total, self.window), config)

    def sort_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        k, v = keys_and_values(cache)
        full = cache.length == self.window
        first = jnp.where(full, cache.next, 0)[..., None]
        order = jnp.arange(k.shape[2])
        order = jnp.where(order < self.window, (first + order) % self.window, order)[..., None]
        k, v = (jnp.take_along_axis(x, order, axis=2) for x in (k, v))
        return store(cache, k, v, cache.length, cache.pages).replace(next=jnp.where(full, 0, cache.length))

    def compress(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> LayerCache:
        """The last tokens of those that are there and those that are new, oldest first."""
        candidates = gather_candidates(cache, k, v, chunk)
        length = jnp.minimum(candidates.length, self.window)
        slot = jnp.arange(max(chunk.pages) * cache.page_size)
        source = jnp.minimum((candidates.length - length)[..., None] + slot, candidates.k.shape[2] - 1)[..., None]
        k, v = (jnp.take_along_axis(x, source, axis=2) for x in (candidates.k, candidates.v))
        packed = store(cache, k, v, length, chunk.pages)
        return packed.replace(next=jnp.where(length == self.window, 0, length))

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        cache = append_new(cache, k, v, step)
        following = jnp.where(step.active[:, None], (cache.next + 1) % self.window, cache.next)
        return cache.replace(next=following)


@dataclasses.dataclass(frozen=True)
class WithWindows(Policy):
    """A policy for the global layers of a model, and rings for those with a window.

    Attributes:
      policy: of the global layers, as the user gave it. windows: of each layer, None of a global one.
    """

    policy: Policy
    windows: tuple[int | None, ...]

    # --- which layer has which --------------------------------------------------------------------------------

    @property
    def chosen(self) -> Policy:
        return self.policy.chosen

    @property
    def named(self) -> Policy:
        return self.policy.named

    @property
    def chosen_once(self) -> bool:
        return self.policy.chosen_once

    def with_chosen(self, policy: Policy) -> Policy:
        return dataclasses.replace(self, policy=policy)

    @property
    def global_layers(self) -> tuple[int, ...]:
        """The numbers of the layers without a window."""
        return tuple(i for i, window in enumerate(self.windows) if window is None)

    def chosen_layers(self, config: ModelConfig) -> tuple[int, ...]:
        return self.global_layers

    def seen_as(self, config: ModelConfig) -> ModelConfig:
        return global_layers_of(config, self.global_layers)

    def part(self, config: ModelConfig, layer: int) -> tuple[Policy, int, ModelConfig]:
        window = self.windows[layer]
        if window is not None:
            return SlidingWindow(window), layer, config
        return self.policy, self.global_layers.index(layer), self.seen_as(config)

    # --- what the parts say, together -------------------------------------------------------------------------

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.grows

    @property
    def replans(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.replans

    @property
    def maintains(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.maintains

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.merges

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.heads_alike

    @property
    def signals(self) -> Signals:
        return self.policy.signals if self.global_layers else Signals()

    @property
    def beyond_context(self) -> bool:
        return self.policy.beyond_context

    @property
    def only_appends(self) -> bool:
        return False

    @property
    def shares_context(self) -> bool:
        """Global layers share where their policy does; every row has rings of its own."""
        return bool(self.global_layers) and self.policy.shares_context

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        return self.policy.window_scale(self.seen_as(config), total)

    def hidden_weights(self, config: ModelConfig, layer: int) -> np.ndarray:
        policy, number, seen_as = self.part(config, layer)
        return policy.hidden_weights(seen_as, number)

    def chunks(self, config: ModelConfig) -> tuple[int, int] | None:
        return self.policy.chunks(self.seen_as(config)) if self.global_layers else None

    def notice(self, config: ModelConfig, total: int) -> str | None:
        return self.policy.notice(self.seen_as(config), total) if self.global_layers else None

    def useless(self, config: ModelConfig, total: int) -> bool:
        return bool(self.global_layers) and self.policy.useless(self.seen_as(config), total)

    def check(self, config: ModelConfig) -> None:
        if self.policy.offloads_rounds:
            raise UsageError(
                f"{type(self.policy).__name__} keeps all rounds below its watershed and chooses among them above, and "
                "this model has layers that see a window of tokens; choose another policy."
            )
        if self.policy.shares_layers:
            raise UsageError(
                "This model has layers that see a window of tokens, which share no budget with the others; use "
                'scope="layer".'
            )
        if self.global_layers:
            self.policy.check(self.seen_as(config))
        elif not isinstance(self.policy, Full):
            raise UsageError(
                f"Every layer of this model keeps its window of {max(self.windows, key=lambda w: w or 0)} tokens, and "
                f"{type(self.policy).__name__} has nothing to choose; leave the policy out."
            )

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        given = self.policy.capacities(self.seen_as(config), prompt, new) if self.global_layers else ()
        return self._by_layer(config, given)

    def own_capacities(self, config: ModelConfig, prompt: int, own: int, new: int) -> tuple[tuple[int, ...], ...]:
        given = self.policy.own_capacities(self.seen_as(config), prompt, own, new) if self.global_layers else ()
        return self._by_layer(config, given)

    def _by_layer(self, config: ModelConfig, chosen: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The global layers' slots and the rings', in the order of the layers."""
        rest = iter(chosen)
        return tuple(
            next(rest) if window is None else (window,) * self.heads_of(config, layer)
            for layer, window in enumerate(self.windows)
        )

    def heads_of(self, config: ModelConfig, layer: int) -> int:
        policy, number, seen_as = self.part(config, layer)
        return policy.heads_of(seen_as, number)

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        policy, number, seen_as = self.part(config, layer)
        kind = policy.layer_kind(seen_as, number)
        return None if kind is None else (self.windows[layer], kind)

    def owners(self, config: ModelConfig, layer: int) -> tuple[Policy, ...]:
        policy, number, seen_as = self.part(config, layer)
        return policy.owners(seen_as, number)

    def pool_policies(self, config: ModelConfig, layer: int) -> tuple[tuple[Policy, ModelConfig], ...]:
        policy, number, seen_as = self.part(config, layer)
        return policy.pool_policies(seen_as, number)

    def budgets(self, config: ModelConfig, layer: int, total: HostOrTraced) -> HostOrTraced:
        policy, number, seen_as = self.part(config, layer)
        return policy.budgets(seen_as, number, total)

    def retained_by_layer(self, layers: Sequence[Any]) -> list[HostOrTraced]:
        return [
            self.policy.retained(cache) if window is None else cache.length
            for cache, window in zip(layers, self.windows, strict=False)
        ]

    # --- what the parts do, each to its own -------------------------------------------------------------------

    def init_layer(
        self, config: ModelConfig, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage = MODEL
    ) -> Any:
        policy, number, seen_as = self.part(config, layer)
        return policy.init_layer(seen_as, number, batch, pages, dtype, storage)

    def beyond_shared(self, state: Any, shared: Int[Array, "B H"] | None) -> Any:
        return self.policy.beyond_shared(state, shared)

    def sort_slots(self, layer: int, cache: Layer, config: ModelConfig) -> Any:
        policy, number, seen_as = self.part(config, layer)
        return policy.sort_slots(number, cache, seen_as)  # pyright: ignore[reportArgumentType]

    def compress(
        self, layer: int, cache: Layer, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> Any:
        policy, number, seen_as = self.part(chunk.config, layer)
        return policy.compress(number, cache, k, v, dataclasses.replace(chunk, config=seen_as))  # pyright: ignore[reportArgumentType]

    def append(self, layer: int, cache: Layer, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step) -> Any:
        policy, number, seen_as = self.part(step.config, layer)
        return policy.append(number, cache, k, v, dataclasses.replace(step, config=seen_as))  # pyright: ignore[reportArgumentType]

    def observe(self, layer: int, cache: Layer, logits: Any, step: Step) -> Any:
        policy, number, seen_as = self.part(step.config, layer)
        return policy.observe(number, cache, logits, dataclasses.replace(step, config=seen_as))  # pyright: ignore[reportArgumentType]

    def due(self, layers: tuple[Layer, ...], config: ModelConfig) -> Bool[Array, " B"]:
        chosen = tuple(layers[i] for i in self.global_layers)
        if not chosen:
            return jnp.zeros(layers[0].length.shape[0], bool)
        return self.policy.due(chosen, self.seen_as(config))  # pyright: ignore[reportArgumentType]

    def maintain(self, layer: int, cache: Layer, config: ModelConfig, row: Int[Array, ""], seen: Int[Array, ""]) -> Any:
        policy, number, seen_as = self.part(config, layer)
        return policy.maintain(number, cache, seen_as, row, seen)  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=256)
def global_layers_of(config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """The model, or one of its layers' views of it, as if it had these layers alone."""
    no_rotary = tuple(i for i, layer in enumerate(layers) if layer in config.no_rotary_layers)
    own = {"num_layers": max(len(layers), 1), "no_rotary_layers": no_rotary, "windows": (), "window_rope": None}
    return dataclasses.replace(config, **own)


def for_model(policy: Policy, config: ModelConfig) -> Policy:
    """The policy beside rings for those layers of a model that have a window; itself where none has."""
    if not config.sliding or isinstance(policy, WithWindows):
        return policy
    return WithWindows(policy, config.windows_by_layer)
