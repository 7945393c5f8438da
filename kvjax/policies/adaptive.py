"""AdaptiveHeads: heads share a budget by their scores, those of a layer (Ada-KV, Feng et al., arXiv 2407.11550) or all
(KVzip, Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import (
    Candidates,
    HostOrTraced,
    Policy,
    PromptChunk,
    Selection,
    Step,
    Weighed,
    floor_fraction,
    numpy_or_jax,
    top_mask,
)
from kvjax.policies.evicting import Evicting
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.inner import Rescoring
from kvjax.policies.lagkv import LagKV
from kvjax.policies.option_checks import one_of
from kvjax.policies.sized import Scoring, Selecting

#: Methods of an evicting policy that must be as its base class has them, since what they do is done for it here.
_RELIED = (
    *("size", "protected", "capacities", "init_state", "sort_slots", "retained", "select", "compress"),
    *("append", "observe"),
)


@dataclasses.dataclass(frozen=True)
class AdaptiveHeads(Rescoring):
    """Keep a layer's highest scores, whatever head they belong to (Ada-KV, arXiv 2407.11550, algorithm 1).

    ``inner`` is any policy that scores every token, ExpectedAttention unless another is given. Of H heads with budget b
    each, the H b highest of all their scores stay; the ``floor`` part of b is kept for each head's own highest, so that
    none is left without. ``floor=1`` is the inner policy itself. Scores of different heads are compared as they are,
    as in NVIDIA's kvpress: attention of one query sums to 1 in each head, and other scores are what they are.

    The bytes are really those of the budget: a row's pages are divided among its heads as the row has chosen, in place
    of masks over equal heads. Chosen once a prompt; decoded tokens all stay; on a later turn the layer's budget is
    divided anew over kept, generated and new tokens. What the inner policy protects stays in its head.

    H2O and AhaKV as ``inner``, and policies of one's own that derive from Evicting, go on dropping a token in each head
    at every decode step. What a head holds after a prompt is then its own budget, which it keeps while decoding; heads
    of a row that has not reached the budget grow by equally many tokens until it has. ``floor`` and the recent tokens,
    of H2O half of the average budget, are of each head. TOVA, which drops the same token in all heads, and LagKV,
    which keeps equally many of each partition, have no scores to divide a budget by.

    ``scope="model"`` lets the heads of all layers share one budget, as KVzip does (arXiv 2505.23416, its non-uniform
    budgets): of L layers the L H b highest scores of the whole model stay, and each head's own floor. A layer may then
    hold most of the cache and another little beyond its floor, in as many bytes. Every layer's keys and values of the
    prompt are held whole until all have scored them, which a plan counts. It is for policies that choose once a prompt.

    Size: ``budget`` tokens a head on average (2,048 when nothing is given) or ``ratio`` of the row's tokens; none in
    ``inner``.
    """

    layers_alike: ClassVar[bool] = True
    shares_slots: ClassVar[bool] = True

    floor: float = 0.2
    scope: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        number("floor", self.floor, 0, 1)
        one_of("scope", self.scope, ("layer", "model"))
        super().__post_init__()
        if self.shares_layers and self._evicting is not None:
            raise UsageError(
                f"{type(self._inner).__name__} drops a token at each decode step by the attention within a layer; give "
                'AdaptiveHeads scope="layer" with it.'
            )

    def takes(self, inner: Scoring) -> bool:
        if not isinstance(inner, Evicting):
            return super().takes(inner)
        return not inner.heads_agree and all(getattr(type(inner), name) is getattr(Evicting, name) for name in _RELIED)

    def refusal(self, inner: Policy, name: str) -> str:
        if isinstance(inner, LagKV):
            return (
                "keeps equally many tokens of each partition in every head, by scores within that partition; give "
                f"{name} a policy whose scores are of all tokens, such as KeyDiff"
            )
        if isinstance(inner, Evicting) and inner.heads_agree:
            return (
                "drops the same token in all heads of a layer, so that its scores cannot tell heads apart; give "
                f"{name} a policy whose heads score for themselves, such as H2O"
            )
        return f"does not choose by a score of each token; give {name} a policy that does, such as KeyDiff"

    @property
    def shares_layers(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all layers share the budget."""
        return self.scope == "model"

    def usual(self) -> Selecting:
        return ExpectedAttention()

    @property
    def _evicting(self) -> Evicting | None:
        """The inner policy at the size of this one, if it drops a token at each decode step."""
        return self.scoring if isinstance(self.scoring, Evicting) else None

    # --- what an inner policy that goes on choosing says ------------------------------------------------------

    @property
    def grows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every decoded token takes another slot."""
        return self.scoring.grows

    @property
    def changes_while_decoding(self) -> bool:
        return self.scoring.changes_while_decoding

    def check(self, config: ModelConfig) -> None:
        inner = self._evicting
        if inner is None:
            return super().check(config)
        return dataclasses.replace(inner, keep_turn=self.keep_turn).check(config)

    def capacities(self, config: ModelConfig, prompt: int, new: int) -> tuple[tuple[int, ...], ...]:
        inner = self._evicting
        return super().capacities(config, prompt, new) if inner is None else inner.capacities(config, prompt, new)

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        state = super().init_state(config, layer, batch, slots)
        if self._evicting is None:
            return state
        return dataclasses.replace(state, budget=jnp.zeros((batch, len(slots)), jnp.int32), equal=state.budget)

    def sort_slots(self, layer: int, cache: LayerCache, config: ModelConfig) -> LayerCache:
        return self.scoring.sort_slots(layer, cache, config)

    def retained(self, cache: LayerCache) -> HostOrTraced:
        return self.scoring.retained(cache)

    def append(
        self, layer: int, cache: LayerCache, k: Float[Array, "B H D"], v: Float[Array, "B H D"], step: Step
    ) -> LayerCache:
        return self.scoring.append(layer, cache, k, v, step)

    def observe(self, layer: int, cache: LayerCache, logits: Float[Array, "B P G R"] | None, step: Step) -> LayerCache:
        return self.scoring.observe(layer, cache, logits, step)

    # --- prompts ----------------------------------------------------------------------------------------------

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        return self.inner_scores(layer, cache, candidates, chunk)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        one = self.weigh(layer, cache, candidates, chunk)
        (keep,) = self.choose([one], chunk.count)
        state = one.state
        if self._evicting is not None:
            size = self.size(chunk.config, layer, chunk.total)
            state = state.shared(keep.sum(axis=2, dtype=jnp.int32), size, chunk.count)
        return Selection(keep, one.marks, state)

    def weigh(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Weighed:
        size, valid = self.size(chunk.config, layer, chunk.total), candidates.valid
        sure = self.protected(candidates, chunk) & valid
        sure = sure | self.of_turn(candidates, chunk, size, sure)
        scores = self.scores(layer, cache, candidates, chunk)
        first = self.scoring.chosen_first(layer, cache, candidates, chunk)
        room = jnp.maximum(size[:, None] - sure.sum(axis=-1, dtype=jnp.int32), 0)
        sure = sure | top_mask(scores, room, valid & ~sure & first)
        least = jnp.maximum(floor_fraction(self.floor, size), 1)[:, None]
        sure = sure | top_mask(scores, jnp.maximum(least - sure.sum(axis=-1, dtype=jnp.int32), 0), valid & ~sure)
        marks = {**candidates.marks, **self.marks_after(layer, cache, candidates, chunk)}
        state = self.state_after(layer, cache, candidates, chunk)
        return Weighed(scores, sure, valid, sure.shape[1] * size, marks, state)

    def choose(self, layers: Sequence[Weighed], count: Int[Array, " B"]) -> list[Bool[Array, "B H N"]]:
        def together(each: Iterable[Array]) -> Array:
            return jnp.concatenate([x.reshape(len(x), 1, -1) for x in each], axis=2)

        scores, sure, valid = (together(getattr(one, name) for one in layers) for name in ("scores", "sure", "valid"))
        budget = jnp.stack([one.budget for one in layers]).sum(axis=0)[:, None]
        free = jnp.maximum(budget - sure.sum(axis=2, dtype=jnp.int32), 0)
        keep = top_mask(scores, free, valid & ~sure) | sure
        # What fits the budget is left untouched, and so is a row with nothing to read this time.
        whole = (valid.sum(axis=2, dtype=jnp.int32) <= budget) | (count == 0)[:, None]
        keep = jnp.where(whole[..., None], valid, keep)
        parts = jnp.split(keep, np.cumsum([one.sure[0].size for one in layers])[:-1], axis=2)
        return [part.reshape(one.sure.shape) for part, one in zip(parts, layers, strict=True)]

    def retained_by_layer(self, layers: Sequence[LayerCache]) -> list[HostOrTraced]:
        pools = [(self.retained(pool), pool.model_layers) for pool in layers]
        return [kept for whole, count in pools for kept in numpy_or_jax(whole).split(whole, count, axis=1)]
