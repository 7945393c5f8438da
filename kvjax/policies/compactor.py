"""Compactor: leverage scores of the keys and non-causal attention (Chari and Van Durme, arXiv 2507.08143)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.page_sharding import PageSharding
from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SEED, MOST_SLOTS, number, optional, true_or_false, whole_number
from kvjax.model.config import ModelConfig
from kvjax.model.rope import angles, rotate
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.option_checks import refuse_unused
from kvjax.policies.pooling import pool
from kvjax.policies.sized import Selecting

#: What is added to the sketched keys' product with themselves, so that it can be divided by: absolute as in kvpress,
#: and a fraction of its mean diagonal, as float32 needs.
_RIDGE, _OF_DIAGONAL = 1e-2, 1e-6


@dataclasses.dataclass(frozen=True)
class Compactor(Selecting):
    """Keep outlying keys and those with high non-causal attention, whatever will be asked (arXiv 2507.08143).

    A token's score is ``blend`` x its leverage + its attention, each standardised over the tokens of all heads of a
    layer (mean 0, deviation 1). Leverage: the statistical leverage score diag(X (X'X)^-1 X') of the centred keys X
    before rotary embedding, projected to ``sketch`` dimensions (0: of the keys themselves) that are random, drawn from
    ``seed`` for each head. Attention: non-causal, what a key gets from all queries of its ``chunk``, earlier and later,
    and 1 / ``chunk`` from each query that a short chunk lacks; the mean over the query heads of a group, times the
    value's norm, averaged with its two neighbours. The first ``sink`` and the last ``recent`` tokens always stay and
    are not scored. No question is needed, so it suits contexts that are read before one.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens, ends included.
    ``blend`` is the fraction of tokens that leave when not given, as in NVIDIA's kvpress, which the other defaults are
    from too. Chosen once a prompt; decoded tokens all stay. On a later turn leverage is of all keys that are there,
    and kept tokens have the attention they had; a decoded token, which no chunk has read, has the average.

    The logits of that attention are products of queries and keys as they are, as in the authors' code and kvpress;
    ``scaled=True`` scales them as the model does. Unlike in kvpress, the keys that a short chunk lacks get no
    attention, as in the authors' code. In an ALiBi model its biases, which are for earlier keys, are left out. The cost
    is one more projection of each prompt to queries and keys.
    """

    layers_alike: ClassVar[bool] = True
    marks: ClassVar[tuple[str, ...]] = ("position", "attention")

    blend: float | None = None
    sink: int = 8
    recent: int = 4
    chunk: int = 256
    sketch: int = 48
    seed: int = 0
    scaled: bool = False

    def __post_init__(self) -> None:
        optional(lambda name, value: number(name, value, 0))("blend", self.blend)
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("recent", self.recent, 0, MOST_SLOTS)
        whole_number("chunk", self.chunk, 2, MOST_SLOTS)
        true_or_false("scaled", self.scaled)
        whole_number("sketch", self.sketch, 0, MOST_SLOTS)
        whole_number("seed", self.seed, 0, MOST_SEED)
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        if not self.sketch:
            refuse_unused(self, ("seed",), "seed is of the random projection, and sketch=0 makes none")

    @property
    def signals(self) -> Signals:
        return Signals(
            noncausal=self.chunk,
            noncausal_scaled=self.scaled,
            noncausal_first=self.sink,
            noncausal_last=self.recent,
        )

    def smallest(self) -> int:
        return self.sink + self.recent + 1

    def protected(self, candidates: Candidates, chunk: PromptChunk) -> Bool[Array, "B H N"]:
        # Sinks never leave, so they are the first candidates of every turn.
        place = jnp.arange(candidates.k.shape[2])
        ends = (place < self.sink) | (place >= candidates.length[..., None] - self.recent)
        return candidates.valid & ends

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        """The attention of each token less 1, the mean of a whole chunk's: 0 of what is decoded later."""
        assert candidates.signals.noncausal is not None
        new = candidates.signals.noncausal.mean(axis=2) - 1
        return {"attention": jnp.where(candidates.fresh_rows, new, candidates.marks["attention"])}

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        free = candidates.valid & ~self.protected(candidates, chunk)
        leverage = standardised(self._leverages(cache, candidates, chunk, free), free, cache.sharding)
        v = candidates.v.astype(jnp.float32)
        mass = self.marks_after(layer, cache, candidates, chunk)["attention"] + 1
        mass = jnp.where(free, mass * jnp.sqrt((v * v).sum(axis=-1)), 0.0)
        attention = standardised(pool(mass, candidates.length - self.recent, 3), free, cache.sharding)
        if self.blend is not None:
            return self.blend * leverage + attention
        kept = self.size(chunk.config, layer, chunk.total) / jnp.maximum(chunk.total, 1)
        return jnp.maximum(1 - kept, 0)[:, None, None] * leverage + attention

    def _leverages(
        self, cache: LayerCache, candidates: Candidates, chunk: PromptChunk, free: Bool[Array, "B H N"]
    ) -> Float[Array, "B H N"]:
        """The leverage of each key among those that are ``free``, one head after the other: they take memory."""
        first = cache.sharding.first_head(free.shape[1])

        def head(i: Array) -> Float[Array, "B N"]:
            k, counted = candidates.k[:, i].astype(jnp.float32), free[:, i]
            if chunk.config.positional == "rope":
                k = before_rope(k, candidates.marks["position"][:, i], chunk)
            return leverages(k, counted, self.projection(k.shape[-1], first + i))

        return jax.lax.map(head, jnp.arange(free.shape[1])).swapaxes(0, 1)

    def projection(self, dim: int, head: int | Array) -> Float[Array, "D S"] | None:
        """The random projection of a head's keys, by the head's number among all of the layer's; None: none."""
        if not self.sketch:
            return None
        key = jax.random.fold_in(jax.random.key(self.seed), head)
        return jax.random.normal(key, (dim, self.sketch), jnp.float32) / self.sketch**0.5


def before_rope(k: Float[Array, "B N D"], position: Int[Array, "B N"], chunk: PromptChunk) -> Float[Array, "B N D"]:
    """Keys of these positions as they were before rotary embedding."""
    cos, sin = angles(chunk.config, position, chunk.seen + chunk.count)
    length = cos * cos + sin * sin  # above 1 in YaRN's models
    return rotate(k, cos / length, -sin / length)


def leverages(
    keys: Float[Array, "B N D"], counted: Bool[Array, "B N"], projection: Float[Array, "D S"] | None
) -> Float[Array, "B N"]:
    """Leverage scores of the ``counted`` rows, centred and projected (None: as they are)."""
    exact = jax.lax.Precision.HIGHEST
    here = counted[..., None]
    mean = jnp.where(here, keys, 0.0).sum(axis=1) / jnp.maximum(counted.sum(axis=-1), 1)[..., None]
    x = jnp.where(here, keys - mean[:, None], 0.0)
    if projection is not None:
        x = jnp.matmul(x, projection, precision=exact)
    product, one = jnp.einsum("bnd,bne->bde", x, x, precision=exact), jnp.eye(x.shape[-1])
    ridge = _RIDGE + _OF_DIAGONAL * jnp.trace(product, axis1=-2, axis2=-1) / x.shape[-1]
    root = jnp.linalg.cholesky(product + ridge[:, None, None] * one)
    inverse = jax.scipy.linalg.solve_triangular(root, jnp.broadcast_to(one, root.shape), lower=True)
    solved = jnp.einsum("bnd,bed->bne", x, inverse, precision=exact)
    return (solved * solved).sum(axis=-1)


def standardised(
    x: Float[Array, "B H N"], counted: Bool[Array, "B H N"], sharding: PageSharding
) -> Float[Array, "B H N"]:
    """Scores less their mean, over their standard deviation, of what is ``counted`` in all heads; 0 elsewhere."""

    def over_heads(x: Float[Array, "B H N"]) -> Float[Array, "B 1 1"]:
        return sharding.mean_over_heads(x.sum(axis=(1, 2), keepdims=True))

    count = over_heads(counted.astype(jnp.float32))
    count = jnp.where(count > 0, count, 1.0)
    centred = jnp.where(counted, x - over_heads(jnp.where(counted, x, 0.0)) / count, 0.0)
    deviation = jnp.sqrt(over_heads(centred * centred) / count)
    return centred / jnp.maximum(deviation, 1e-6)
