"""KeyDiff: keep the keys that are least like the others (Park et al., arXiv 2504.15364). Attention-free."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.policies.base import Candidates, PromptChunk
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class KeyDiff(Selecting):
    """Keep the tokens whose keys differ most from the average key (KeyDiff, arXiv 2504.15364).

    A token's score is minus the cosine between its key and the anchor, the mean over the row's tokens of the
    normalised keys of that head; the highest ``budget`` stay. No attention is read and nothing is protected, neither
    sinks nor recent tokens: sinks' keys are distinctive by themselves. Chosen once a prompt; decoded tokens all stay;
    on a later turn the anchor is the mean over what is there: kept, generated and new tokens.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens.
    """

    layers_alike: ClassVar[bool] = True

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        k = candidates.k.astype(jnp.float32)
        unit = k * jax.lax.rsqrt(jnp.maximum((k * k).sum(axis=-1, keepdims=True), 1e-24))
        unit = jnp.where(candidates.valid[..., None], unit, 0.0)
        anchor = unit.sum(axis=2) / jnp.maximum(candidates.length, 1)[..., None]
        length = jnp.sqrt((anchor * anchor).sum(axis=-1, keepdims=True))
        exact = jax.lax.Precision.HIGHEST
        score = -jnp.einsum("bhnd,bhd->bhn", unit, anchor / jnp.maximum(length, 1e-12), precision=exact)
        # Two keys are equally close to their mean; only rounding, which another batch changes, would tell them apart.
        return jnp.where(candidates.length[..., None] == 2, 0.0, score)
