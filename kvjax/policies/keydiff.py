"""KeyDiff: keep the keys that are least like the others (Park et al., arXiv 2504.15364). Attention-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk
from kvjax.policies.profile import StatisticsProfile
from kvjax.policies.profile_files import read_profile
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class KeyDiff(Selecting):
    """Keep the tokens whose keys differ most from the average key (KeyDiff, arXiv 2504.15364).

    A token's score is minus the cosine between its key and the anchor, the mean over the row's tokens of the
    normalised keys of that head; the highest ``budget`` stay. No attention is read and nothing is protected, neither
    sinks nor recent tokens: sinks' keys are distinctive by themselves. Chosen once a prompt; decoded tokens all stay;
    on a later turn the anchor is the mean over what is there: kept, generated and new tokens.

    ``profile`` has anchors that are means over texts instead (``kvjax calibrate statistics``; a file or a profile), the
    same for every row and turn. The paper has none: see :mod:`kvjax.calibrate.statistics`.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens.
    """

    layers_alike: ClassVar[bool] = True

    profile: StatisticsProfile | str | None = None

    def __post_init__(self) -> None:
        read_profile(self, StatisticsProfile)
        super().__post_init__()

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no head has an anchor of its own from texts."""
        return self.profile is None

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        return super().layer_kind(config, layer) if self.profile is None else None

    def check(self, config: ModelConfig) -> None:
        if isinstance(self.profile, StatisticsProfile):
            self.profile.check(config)

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        unit = jnp.where(candidates.valid[..., None], unit_keys(candidates.k), 0.0)
        if isinstance(self.profile, StatisticsProfile):
            return -_cosine(unit, jnp.asarray(self.profile.anchor(layer))[None])
        score = -_cosine(unit, unit.sum(axis=2) / jnp.maximum(candidates.length, 1)[..., None])
        # Two keys are equally close to their mean; only rounding, which another batch changes, would tell them apart.
        return jnp.where(candidates.length[..., None] == 2, 0.0, score)


def unit_keys(k: Float[Array, "B H N D"]) -> Float[Array, "B H N D"]:
    """The keys in float32, each of length 1; a key of zeros stays one."""
    k = k.astype(jnp.float32)
    return k * jax.lax.rsqrt(jnp.maximum((k * k).sum(axis=-1, keepdims=True), 1e-24))


def _cosine(unit: Float[Array, "B H N D"], anchor: Float[Array, "#B H D"]) -> Float[Array, "B H N"]:
    """Cosines between keys of length 1 and the anchor."""
    length = jnp.sqrt((anchor * anchor).sum(axis=-1, keepdims=True))
    toward = jnp.broadcast_to(anchor / jnp.maximum(length, 1e-12), (unit.shape[0], *anchor.shape[1:]))
    return jnp.einsum("bhnd,bhd->bhn", unit, toward, precision=jax.lax.Precision.HIGHEST)
