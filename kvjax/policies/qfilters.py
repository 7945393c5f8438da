"""Q-Filters: keys along the direction that a head's queries share (Godey et al., arXiv 2503.02812). Attention-free."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk
from kvjax.policies.profile import FilterProfile
from kvjax.policies.profile_files import profile_of, read_profile
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class QFilters(Selecting):
    """Keep the keys that reach farthest along the direction that their head's queries share (arXiv 2503.02812).

    A token's score is the product of its key, as cached, and its head's filter: the first right singular vector of the
    queries that calibration saw after rotary embedding, its sign chosen so that their mean lies on its side, averaged
    over the query heads of a group. ``profile`` has the filters (``kvjax calibrate qfilters``; a file, or the one that
    comes with kvjax for this model when not given). No attention is read and nothing is protected. Chosen once a
    prompt; decoded tokens all stay.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens.
    """

    #: Each head has a filter of its own, so it must know which heads it has: all of them.
    heads_alike: ClassVar[bool] = False

    profile: FilterProfile | str | None = None

    def __post_init__(self) -> None:
        read_profile(self, FilterProfile)
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        profile_of(self, FilterProfile, config).check(config)

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        filters = np.asarray(profile_of(self, FilterProfile, chunk.config).filters[layer], np.float32)
        filters = jnp.asarray(filters.reshape(chunk.config.num_kv_heads, -1))
        exact = jax.lax.Precision.HIGHEST
        return jnp.einsum("bhnd,hd->bhn", candidates.k.astype(jnp.float32), filters, precision=exact)
