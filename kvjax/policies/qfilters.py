"""Q-Filters: keys along the direction that a head's queries share (Godey et al., arXiv 2503.02812). Attention-free."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.pool import LayerCache
from kvjax.errors import UsageError, quoted
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk
from kvjax.policies.profile import FilterProfile, load_profile, packaged
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
        if isinstance(self.profile, (str, os.PathLike)):
            object.__setattr__(self, "profile", load_profile(self.profile))
        if self.profile is not None and not isinstance(self.profile, FilterProfile):
            raise UsageError(
                f"profile is {quoted(self.profile)}; give a file of `kvjax calibrate qfilters`, or its FilterProfile."
            )
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        self._profile_of(config).check(config)

    def _profile_of(self, config: ModelConfig) -> FilterProfile:
        found = self.profile if self.profile is not None else packaged(FilterProfile, config)
        if not isinstance(found, FilterProfile):
            raise UsageError(
                "No profile of this model's queries comes with kvjax; make one with `kvjax calibrate qfilters` and "
                "give it as profile."
            )
        return found

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        filters = np.asarray(self._profile_of(chunk.config).filters[layer], np.float32)
        filters = jnp.asarray(filters.reshape(chunk.config.num_kv_heads, -1))
        exact = jax.lax.Precision.HIGHEST
        return jnp.einsum("bhnd,hd->bhn", candidates.k.astype(jnp.float32), filters, precision=exact)
