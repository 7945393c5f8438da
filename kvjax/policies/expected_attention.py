"""ExpectedAttention: how much queries to come are expected to attend to each key (Devoto et al., arXiv 2510.00636)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.attention import NEG
from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_SLOTS, number, true_or_false, whole_number
from kvjax.model.alibi import slopes
from kvjax.model.config import ModelConfig
from kvjax.model.rope import angles, rotate
from kvjax.policies.base import Candidates, PromptChunk, Signals
from kvjax.policies.option_checks import refuse_unused
from kvjax.policies.profile import StatisticsProfile
from kvjax.policies.profile_files import read_profile
from kvjax.policies.signals import QueryStats
from kvjax.policies.sized import SelectingPastSinks

#: Keys whose scores are computed at a time; bounds the product of keys and covariances to G blocks of keys.
_BLOCK = 256
#: The square of a value's norm is taken to be at least this, so that its logarithm is finite.
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(SelectingPastSinks):
    """Keep what future queries are expected to attend to, weighted by the value's norm (arXiv 2510.00636).

    Queries before rotary embedding are taken to be Gaussian, with the mean and covariance of the row's own queries
    from the ``sink``-th token on. Rotated by the rotary matrix averaged over the next ``future`` positions they have
    mean m and covariance C, and a key k expects the weight exp(k.m / sqrt(D) + k'Ck / 2D), normalised over the row's
    keys but its sinks. Weights are averaged over the query heads of a group; a token's score is
    (weight + ``epsilon``) x |v|, computed as a logarithm, and the highest stay beside the first ``sink`` tokens.
    ``covariance=False`` and ``values=False`` leave out those parts. The paper has no ``epsilon``; 0.01 is what its
    authors' entry in kvpress's leaderboard has, and finds what 0 loses: of 12 needles in noise and in essays, at half
    of 1,280 tokens and asked afterwards, 3 and 10 instead of 0 and 4 (SmolLM2-135M).

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens, sinks included.
    Chosen once a prompt; decoded tokens all stay. On a later turn the statistics are those of the queries of all
    turns so far (not of decoded tokens), and the average starts at the row's new end. With ALiBi nothing rotates, and
    each key's weight has its bias as the row's next query would see it.

    ``profile`` has the mean and the covariance of the queries of texts instead (``kvjax calibrate statistics``; a file
    or a profile), the same for every row and turn, as kvpress's ExpectedAttentionStatsPress has them.
    """

    layers_alike: ClassVar[bool] = True

    sink: int = 4
    future: int = 512
    epsilon: float = 0.01
    covariance: bool = True
    values: bool = True
    profile: StatisticsProfile | str | None = None

    def __post_init__(self) -> None:
        read_profile(self, StatisticsProfile)
        whole_number("sink", self.sink, 0, MOST_SLOTS)
        whole_number("future", self.future, 1, MOST_SLOTS)
        number("epsilon", self.epsilon, 0)
        true_or_false("covariance", self.covariance)
        true_or_false("values", self.values)
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        if config.positional == "alibi":
            refuse_unused(self, ("future",), "Nothing rotates in an ALiBi model")
        if not self.values:
            refuse_unused(self, ("epsilon",), "epsilon lets values count more, and values=False leaves them out")
        if isinstance(self.profile, StatisticsProfile):
            self.profile.check(config)

    @property
    def heads_alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether no head has statistics of its own from texts."""
        return self.profile is None

    def layer_kind(self, config: ModelConfig, layer: int) -> Hashable | None:
        return super().layer_kind(config, layer) if self.profile is None else None

    @property
    def signals(self) -> Signals:
        return Signals(queries=True, query_skip=self.sink) if self.profile is None else Signals()

    def init_state(self, config: ModelConfig, layer: int, batch: int, slots: tuple[int, ...]) -> Any:
        if self.profile is not None:
            return None
        return QueryStats.none(batch, len(slots), config.group_size, config.head_dim)

    def state_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> QueryStats | None:
        if self.profile is not None:
            return None
        assert candidates.signals.queries is not None
        return cache.state.merge(candidates.signals.queries)

    log_scores: ClassVar[bool] = True
    attention_scores: ClassVar[bool] = True

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        stats = self.state_after(layer, cache, candidates, chunk)
        if isinstance(self.profile, StatisticsProfile):
            rows = candidates.k.shape[0]
            mean, covariance = (jnp.broadcast_to(x, (rows, *x.shape)) for x in self.profile.queries(layer))
        else:
            assert stats is not None
            mean, covariance = stats.mean, stats.covariance
        if chunk.config.positional == "rope":
            mean, covariance = rotate_ahead(mean, covariance, *self._rotation(chunk))
        logits = expected_logits(
            candidates.k, mean, covariance if self.covariance else None, chunk.config.attention_scale
        )
        if chunk.config.positional == "alibi":
            ahead = candidates.marks["position"] - (chunk.seen + chunk.count)[:, None, None]
            logits = logits + slopes(chunk.config)[..., None] * ahead[:, :, None].astype(jnp.float32)
        counted = candidates.valid & ~self.protected(candidates, chunk)
        # Logarithms: most weights are far below float32's smallest number, and zeros would be ties.
        each = jax.nn.log_softmax(jnp.where(counted[:, :, None], logits, NEG), axis=-1)
        weight = jax.nn.logsumexp(each, axis=2) - math.log(each.shape[2])
        if not self.values:
            return weight
        if self.epsilon:
            weight = jnp.logaddexp(weight, math.log(self.epsilon))
        v = candidates.v.astype(jnp.float32)
        return weight + 0.5 * jnp.log(jnp.maximum((v * v).sum(axis=-1), _TINY))

    def _rotation(self, chunk: PromptChunk) -> tuple[Float[Array, "B F"], Float[Array, "B F"]]:
        """cos and sin averaged over the positions that follow each row's last token."""
        seen = chunk.seen + chunk.count
        cos, sin = angles(chunk.config, seen[:, None] + jnp.arange(self.future), seen)
        return cos.mean(axis=1), sin.mean(axis=1)


def rotate_ahead(
    mean: Float[Array, "B H G D"],
    covariance: Float[Array, "B H G D D"],
    cos: Float[Array, "B F"],
    sin: Float[Array, "B F"],
) -> tuple[Float[Array, "B H G D"], Float[Array, "B H G D D"]]:
    """Mean and covariance of R q, where R rotates channel pairs by (cos, sin), which need not be of length 1."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    rows = rotate(covariance, cos[:, :, :, None], sin[:, :, :, None])
    return rotate(mean, cos, sin), rotate(rows.swapaxes(-1, -2), cos[:, :, :, None], sin[:, :, :, None])


def expected_logits(
    k: Float[Array, "B H N D"],
    mean: Float[Array, "B H G D"],
    covariance: Float[Array, "B H G D D"] | None,
    scale: float,
) -> Float[Array, "B H G N"]:
    """log E[exp(s q.k)] for Gaussian q and the softmax scale s: s k.m + s^2 k'Ck / 2, blocks of keys at a time."""
    batch, heads, count, dim = k.shape
    exact = jax.lax.Precision.HIGHEST

    def block(keys: Array) -> Array:
        keys = keys.astype(jnp.float32)
        logits = jnp.einsum("bhnd,bhgd->bhgn", keys, mean, precision=exact) * scale
        if covariance is not None:
            product = jnp.einsum("bhnd,bhgde->bhgne", keys, covariance, precision=exact)
            logits = logits + (product * keys[:, :, None]).sum(axis=-1) / (2 * scale**-2)
        return logits

    if count <= _BLOCK:
        return block(k)
    padded = jnp.pad(k, ((0, 0), (0, 0), (0, -count % _BLOCK), (0, 0)))
    blocks = padded.reshape(batch, heads, -1, _BLOCK, dim).transpose(2, 0, 1, 3, 4)
    logits = jax.lax.map(block, blocks).transpose(1, 2, 3, 0, 4)
    return logits.reshape(batch, heads, logits.shape[2], -1)[..., :count]
