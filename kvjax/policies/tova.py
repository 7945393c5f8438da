"""TOVA: at every step the token the newest query cares for least is dropped, in all heads of a layer at once."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.policies.base import Candidates, PromptChunk, Signals, Step
from kvjax.policies.evicting import Evicting, attention_weights


@dataclasses.dataclass(frozen=True)
class TOVA(Evicting):
    """Token omission via attention (Oren et al., arXiv 2401.06104): keep what the last query attends to most.

    The score of a token is the last query's attention to it, the mean over all query heads of the layer, which drop the
    same token together. Of a prompt or a later turn the top ``budget`` under its last query stay; while decoding, the
    lowest under each new query leaves. Nothing accumulates and nothing is protected, neither first nor recent tokens:
    the newest itself may leave, as in the official code. Ties go to the later token.

    Size: ``budget`` tokens a head, or ``ratio`` of the tokens a row has seen when a prompt is in; with neither, 2,048.
    Where a layer's heads are split between policies, the mean is over the heads this one was given.
    """

    layers_alike: ClassVar[bool] = True

    marks: ClassVar[tuple[str, ...]] = ("position",)
    heads_agree: ClassVar[bool] = True

    @property
    def signals(self) -> Signals:
        return Signals(window=1, decode_logits=True)

    def prompt_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> tuple[Float[Array, "B H N"], Float[Array, "B H N"]]:
        assert candidates.signals.window is not None
        mean = cache.sharding.mean_over_heads(candidates.signals.window.mean(axis=(1, 2)))
        scores = jnp.broadcast_to(mean[:, None], candidates.k.shape[:3])
        return scores, scores

    def rank(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        heads = len(cache.pages)
        weights = attention_weights(cache, logits, sink_logits=step.sink_logits)
        # Every head made the same choices so far, so a slot holds the same token in all of them.
        by_slot = weights.reshape(weights.shape[0], heads, -1, *weights.shape[2:]).mean(axis=(1, 3))
        return jnp.tile(cache.sharding.mean_over_heads(by_slot), (1, heads, 1))
