"""ThinK: keys keep the channels that the last queries attend by, and drop the others (arXiv 2407.21018)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.layout import platform_layout
from kvjax.cache.pool import with_key_channels
from kvjax.cache.quantisation import MODEL, Storage
from kvjax.checks import MOST_SLOTS, number, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy, PromptChunk, Signals, top_mask
from kvjax.policies.candidates import places_of
from kvjax.policies.composed import FULL, HeadWise, check_inner
from kvjax.policies.profile import Heads


@dataclasses.dataclass(frozen=True)
class ThinK(HeadWise):
    """Store only some channels of each key, those by which the last queries attend most (ThinK, arXiv 2407.21018).

    ``channels`` is the fraction that stays, 0.6 as in the paper's experiments (its lambda is what leaves, 0.4), rounded
    up to a multiple of 8 channels, or of an eighth of them where a head has fewer than 64. In each head of each row
    they are those with the highest score

        sum over the last ``window`` queries of q_i^2  x  sum over the prompt's keys of k_i^2,

    which is the square of ||Q_i K_i||_F (equation 6), queries and keys after rotary embedding, the mean over the query
    heads of a group; of equal scores the later channel's. Keys are stored with these channels alone, and queries are
    cut to them, so that q.k is exactly what it is with the other channels at 0. Values stay whole. ``inner`` says which
    tokens stay, all of them unless it is given, and sees whole keys when it first chooses among them.

    Chosen once, when a row's first prompt (or, in chunked prefill, its first chunk) is in. Decided where sources
    differ: the authors' code leaves the keys of the last 128 tokens and of decoded ones whole, beside the others;
    NVIDIA's kvpress sets channels of the whole prompt to 0 and drops none. Here every key of a head has the same
    channels, so that a step reads one pool; within a prompt all tokens attend with whole keys to its own tokens.

    A slot takes (K + D) / 2D of its bytes on CPUs and GPUs. A TPU's rows are whole registers of 128 lanes, so there it
    saves where K + D needs fewer of these: not in heads of 64 or 128 channels.
    """

    layers_alike: ClassVar[bool] = True
    whole_layers: ClassVar[bool] = True

    channels: float = 0.6
    window: int = 32
    inner: Policy | None = None

    def __post_init__(self) -> None:
        number("channels", self.channels, 0, 1, open_below=True)
        whole_number("window", self.window, 1, MOST_SLOTS)
        if self.inner is not None:
            check_inner(self.inner)

    def protected(self, config: ModelConfig) -> Heads:
        return ((),) * config.num_layers

    def others(self, config: ModelConfig) -> Policy:
        return self.unsized

    @property
    def unsized(self) -> Policy:
        return self.inner or FULL

    def kept_channels(self, config: ModelConfig) -> int:
        """K, the channels of each key that are stored."""
        unit = min(8, max(config.head_dim // 8, 1))
        return math.ceil(self.channels * config.head_dim / unit - 1e-9) * unit

    def check(self, config: ModelConfig) -> None:
        kept, unit = self.kept_channels(config), min(8, max(config.head_dim // 8, 1))
        if kept >= config.head_dim:
            raise UsageError(
                f"channels={self.channels:g} of {config.head_dim} is all of them, in multiples of {unit}; give at most "
                f"{(config.head_dim - unit) / config.head_dim:g}."
            )
        self.check_others(config)

    def notice(self, config: ModelConfig, total: int) -> str | None:
        kept, whole = self.kept_channels(config), config.head_dim
        if self._saves_nothing(config):
            return (
                f"On this device a row takes whole registers of 128 lanes, so that keys of {kept} channels beside "
                f"values of {whole} take as many bytes as keys of {whole} would; ThinK saves nothing here."
            )
        return super().notice(config, total)

    def useless(self, config: ModelConfig, total: int) -> bool:
        # Over a policy that drops tokens it still has what that one saves.
        return (self.inner is None and self._saves_nothing(config)) or super().useless(config, total)

    def _saves_nothing(self, config: ModelConfig) -> bool:
        """Whether rows of fewer channels take as many bytes on this device."""
        kept, whole = self.kept_channels(config), config.head_dim
        usual = platform_layout(whole)
        cut = jax.eval_shape(lambda: usual.with_key_channels(kept, whole).zeros(1, 1, whole, jnp.int8, kept))
        return cut.slot_nbytes >= jax.eval_shape(lambda: usual.zeros(1, 1, whole, jnp.int8)).slot_nbytes

    @property
    def signals(self) -> Signals:
        return dataclasses.replace(self.unsized.signals, squares=self.window)

    @property
    def shares_context(self) -> bool:
        """Every row has channels of its own."""
        return False

    def init_layer(
        self, config: ModelConfig, layer: int, batch: int, pages: tuple[int, ...], dtype: Any, storage: Storage = MODEL
    ) -> Any:
        whole = super().init_layer(config, layer, batch, pages, dtype, storage)
        return with_key_channels(whole, self.kept_channels(config))

    def compress(
        self, layer: int, cache: Any, k: Float[Array, "B H T D"], v: Float[Array, "B H T D"], chunk: PromptChunk
    ) -> Any:
        assert chunk.signals is not None and chunk.signals.squares is not None
        chosen = key_channels(chunk.signals.squares, k, chunk.count, cache.channels.shape[2])
        first = (chunk.seen == 0)[:, None, None]
        cache = cache.replace(channels=jnp.where(first, chosen, cache.channels))
        return super().compress(layer, cache, k, v, chunk)


def key_channels(
    squares: Float[Array, "B H G D"], k: Float[Array, "B H T D"], count: Int[Array, " B"], kept: int
) -> Int[Array, "B H K"]:
    """The ``kept`` channels with the highest scores, in rising order: see :class:`ThinK`.

    Args:
      squares: means of the queries' squares. k: of which each row's first ``count`` count.
    """
    wide = k.astype(jnp.float32)
    real = (jnp.arange(k.shape[2]) < count[:, None])[:, None, :, None]
    energy = jnp.where(real, wide * wide, 0.0).sum(axis=2) / jnp.maximum(count, 1)[:, None, None]
    scores = squares.mean(axis=2) * energy
    most = top_mask(scores, jnp.full((k.shape[0], 1), kept, jnp.int32), jnp.ones(scores.shape, bool))
    return places_of(most, kept)[0].astype(jnp.int32)
