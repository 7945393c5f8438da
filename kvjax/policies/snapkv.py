"""SnapKV: what the last queries of a prompt look at, with its neighbours (Li et al., arXiv 2404.14469)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, whole_number
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.option_checks import one_of
from kvjax.policies.pooling import Group, Pooling, check_pooling, over_group, pool, window_mass
from kvjax.policies.sized import Selecting


@dataclasses.dataclass(frozen=True)
class Observing(Selecting):
    """Base of the policies that keep a window of recent tokens whole and choose the rest by what its queries attend to.

    The last ``window`` tokens always stay; of the tokens before them, the prefix, those with the highest scores fill
    the budget. Scores come from the last ``window`` queries of the turn (all of them, in a shorter one), normalised
    over every key they see, the window's own included; the window's columns are dropped.

    On a later turn the prefix is what earlier selections kept, what was generated since, and the new tokens before
    the window.
    """

    attention_scores: ClassVar[bool] = True

    window: int = 32

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1, MOST_SLOTS)
        super().__post_init__()

    @property
    def signals(self) -> Signals:
        return Signals(window=self.window)

    def smallest(self) -> int:
        return self.window + 1

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        place = jnp.arange(candidates.k.shape[2])
        return candidates.valid & (place >= self.prefix(candidates)[..., None])

    def prefix(self, candidates: Candidates) -> Int[Array, "B H"]:
        """Candidates before the window; they come first."""
        return jnp.maximum(candidates.length - self.window, 0)


@dataclasses.dataclass(frozen=True)
class Pooled(Observing):
    """Base of those that pool scores along the prefix: its neighbours are the nearest tokens that are still there."""

    kernel: int = 5
    pooling: Pooling = "avg"

    def __post_init__(self) -> None:
        check_pooling(self.kernel, self.pooling)
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class SnapKV(Pooled):
    """Keep what the prompt's last queries attend to, and its neighbours (SnapKV, arXiv 2404.14469).

    The attention of the last ``window`` queries is summed over them for each query head, pooled along the sequence
    with ``kernel``, and aggregated over the query heads that share a KV head (``group``); the highest
    ``budget - window`` of the prefix stay, with the window itself. Chosen once a prompt; decoded tokens all stay.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens, window included.
    As in the official code, average pooling counts zeros beyond the ends of the prefix. The official code scores each
    query head on its own and repeats keys for it; here one decision serves the KV head, which is what is stored.
    """

    layers_alike: ClassVar[bool] = True

    group: Group = "mean"

    def __post_init__(self) -> None:
        one_of("group", self.group, ("mean", "sum", "max"))
        super().__post_init__()

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        prefix = self.prefix(candidates)[:, :, None]
        pooled = pool(window_mass(candidates), prefix, self.kernel, self.pooling)
        return over_group(pooled, self.group)
