"""NACL: the best by the last tokens' attention, and some of the others drawn at random (Chen et al., ACL 2024)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SEED, MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError, quoted
from kvjax.policies.base import Candidates, PromptChunk, Signals, floor_fraction, top_mask
from kvjax.policies.option_checks import one_of
from kvjax.policies.pooling import Group, over_group, window_mass
from kvjax.policies.sized import Selecting

#: Above every perturbed score: attention mass of a window plus a Gumbel draw.
_CHOSEN = 1e30


@dataclasses.dataclass(frozen=True)
class NACL(Selecting):
    """Keep the best by proxy attention, a random draw among the rest, and protected ends (NACL, arXiv 2408.03675).

    The proxy tokens are the last ``proxy`` fraction of the row (1 %), rounded up (the official code takes the whole
    part, which is none of fewer than a hundred tokens); their attention, summed, scores every token. It is the model's
    own: causal, so that a proxy token gets nothing from those before it, and normalised over all that each of them
    sees. The original keeps 12 % of a row's tokens by that score, 7 % drawn without replacement with probabilities
    softmax of the scores of those left over, and protects 1 % at its ends. Here these are fractions of the budget,
    12 : 7 : 1: ``random`` of it is drawn, ``protect`` of it is the first ``sink`` tokens and the most recent ones (at
    least one of these), and the rest goes to the best scores. ``random=0`` is the paper's proxy eviction alone.

    Size: ``ratio`` of the row's tokens (0.2, the original's, when nothing is given) or ``budget`` tokens a head.
    Chosen once a prompt; decoded tokens all stay.

    The draw takes the largest of score plus a Gumbel number made from (``seed``, layer, KV head, position), which is
    sampling without replacement: a token's luck does not depend on its row, its batch or its padding, and on a later
    turn it is the same. The original's 256 sinks are far more than a twentieth of a small budget, so 4 is the default.
    """

    proxy: float = 0.01
    random: float = 0.35
    protect: float = 0.05
    sink: int = 4
    seed: int = 0
    group: Group = "mean"

    default: ClassVar[dict] = {"ratio": 0.2}
    marks: ClassVar[tuple[str, ...]] = ("position",)

    def __post_init__(self) -> None:
        number("proxy", self.proxy, 0, 1, open_below=True)
        number("random", self.random, 0, 1)
        number("protect", self.protect, 0, 1)
        if self.random + self.protect > 1:
            raise UsageError(
                f"random={quoted(self.random)} and protect={quoted(self.protect)} are fractions of one budget; "
                "give numbers that add up to at most 1."
            )
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("seed", self.seed, 0, MOST_SEED)
        one_of("group", self.group, ("mean", "sum", "max"))
        super().__post_init__()

    @property
    def signals(self) -> Signals:
        return Signals(window_share=self.proxy)

    def smallest(self) -> int:
        return self.sink + 2

    def parts(self, budget: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        """Tokens of a budget kept by (score, draw, protection)."""
        protected = jnp.maximum(floor_fraction(self.protect, budget), self.sink + 1)
        drawn = jnp.minimum(floor_fraction(self.random, budget), budget - protected)
        return budget - protected - drawn, drawn, protected

    def _parts(self, chunk: PromptChunk) -> tuple[Int[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        return self.parts(self.size(chunk.config, 0, chunk.total))

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        place = jnp.arange(candidates.k.shape[2])
        recent = (self._parts(chunk)[2] - self.sink)[:, None, None]
        # Sinks never leave, so they are the first candidates of every turn.
        ends = (place < self.sink) | (place >= candidates.length[..., None] - recent)
        return candidates.valid & ends

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        score = over_group(window_mass(candidates), self.group)
        among = candidates.valid & ~self.protected(candidates, chunk)
        best = top_mask(score, self._parts(chunk)[0][:, None], among)
        # The base fills the budget from the top: first all of the best, then the luckiest of the others.
        first = cache.sharding.first_head(len(cache.pages))
        return jnp.where(best, _CHOSEN, score + self.draws(layer, candidates.marks["position"], first))

    def draws(self, layer: int, position: Int[Array, "B H N"], first_head: int | Array = 0) -> Float[Array, "B H N"]:
        """A Gumbel number for every token, made from what identifies it and nothing else.

        ``first_head`` is the number of the first of these heads, which on a mesh may be some of a layer's.
        """
        key = jax.random.fold_in(jax.random.key(self.seed), layer)
        heads = jax.vmap(jax.random.fold_in, (None, 0))(key, first_head + jnp.arange(position.shape[1]))

        def one(head: Array, place: Array) -> Array:
            return jax.random.gumbel(jax.random.fold_in(head, place), dtype=jnp.float32)

        by_token = jax.vmap(one, (None, 0))
        return jax.vmap(jax.vmap(by_token, (0, 0)), (None, 0))(heads, position)
