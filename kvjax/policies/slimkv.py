"""SlimKV: attention of the last queries times the largest activation of the value."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.option_checks import one_of
from kvjax.policies.pooling import over_group, pool, window_mass
from kvjax.policies.snapkv import Pooled


@dataclasses.dataclass(frozen=True)
class SlimKV(Pooled):
    """Keep tokens that are attended to and whose values are large (SlimKV: large activations in the KV cache).

    S1 is the attention of the last ``window`` queries, summed over them and over the query heads of the group [3]; S2
    the largest absolute channel of the value [4]; S = S1 x S2 [5] is pooled along the sequence (Listing 1), and the
    highest ``budget - window`` of the prefix stay, with the window itself. One decision a KV head, for grouped-query
    and multi-head attention alike. Chosen once a prompt; decoded tokens all stay.

    Size: ``budget`` tokens a head (the paper's tables: 128, 256 and 2,048, the default) or ``ratio`` of the row's
    tokens, window included. ``score="s1"`` and ``"s2"`` are the paper's ablation.

    Decided where the paper is silent: the softmax is over all keys, and the window's columns are dropped after it;
    pooling is average (``pooling="max"`` is the other), and counts zeros beyond the ends of the prefix, as Listing 1's
    ``pool1d`` with ``padding`` does.
    """

    layers_alike: ClassVar[bool] = True

    score: Literal["both", "s1", "s2"] = "both"

    def __post_init__(self) -> None:
        one_of("score", self.score, ("both", "s1", "s2"))
        super().__post_init__()

    @property
    def signals(self) -> Signals:
        return Signals() if self.score == "s2" else super().signals

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        combined = jnp.ones(candidates.k.shape[:3], jnp.float32)
        if self.score != "s2":
            combined = over_group(window_mass(candidates), "sum")
        if self.score != "s1":
            combined = combined * jnp.abs(candidates.v.astype(jnp.float32)).max(axis=-1)
        return pool(combined, self.prefix(candidates), self.kernel, self.pooling)
