"""Statistics of a model's queries and keys over texts, for policies that otherwise take a prompt's own.

ExpectedAttention (arXiv 2510.00636) takes queries to come to be Gaussian. Its mean and covariance may be those of the
prompt's queries, or of the queries of a corpus, found once a model: kvpress's ExpectedAttentionStatsPress, from the
method's authors. As there queries are taken before rotary embedding, those of each text's first tokens left out, and
each query head has its own; there the covariance is divided by one less than the number of queries, here by the number,
as for a prompt's.

KeyDiff (arXiv 2504.15364) takes the mean of a prompt's normalised keys, its anchor, for what keys have in common. The
paper measures no other; here the same mean over texts may stand for it, of keys as they are cached, after rotary
embedding, and of every token: the paper leaves out none. Channels that rotate fast average out over positions; those
that rotate slowly keep a direction, so pieces should be about as long as prompts.

Each piece is read one layer at a time. Its queries' mean and covariance are gathered in blocks and merged with those of
other pieces by Chan et al.'s update, in float32: sums of squares would cancel where a mean is large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.calibrate.pieces import pieces_of
from kvjax.checkpoints.load import LanguageModel, check_model
from kvjax.checks import MOST_SEED, MOST_SLOTS, whole_number
from kvjax.errors import UsageError
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles
from kvjax.policies.full import Full
from kvjax.policies.keydiff import unit_keys
from kvjax.policies.profile import SINGLE, ModelShape, StatisticsProfile, lower_roots, model_name, packed_numbers
from kvjax.policies.signals import QueryStats, Signals
from kvjax.policies.window_layers import for_model
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from kvjax.runtime.signal_collector import PartialSignals, SignalCollector
from pallas_kernels.kept_tokens import KeptTokens


def text_statistics(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    tokens: int = 1024,
    most: int = 32,
    sink: int = 4,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> StatisticsProfile:
    """Statistics of every head of a model over texts, of its global layers where others have a window.

    Args:
      lm: the model.
      texts: what it reads; each is cut into pieces.
      tokens: of a piece, or what fits the model's context. most: pieces, drawn at random from the longest.
      sink: first tokens of each piece whose queries do not count.
      seed: of the pieces that are drawn.
      progress: called after each piece with the pieces done and their number.

    Raises:
      UsageError: no text, pieces of which no query counts, or a model without global layers.
    """
    check_model(lm)
    check(tokens=tokens, most=most, sink=sink, seed=seed)
    found = pieces_of(lm, texts, tokens)
    order = np.random.default_rng(seed).permutation(len(found))
    pieces = [found[i] for i in sorted(order, key=lambda i: -len(found[i]))[:most] if len(found[i]) > sink]
    if not pieces:
        longest = max(map(len, found))
        raise UsageError(
            f"The queries of a piece's first {sink} tokens do not count, and no piece has more: the longest has "
            f"{longest}. Give a smaller sink, or longer pieces."
        )
    config = lm.config
    total: list[LayerStatistics] = []
    for number, ids in enumerate(pieces, 1):
        observer = TextStatistics(config, jnp.int32(len(ids)), sink)
        read = [one for _, one in forward_layers(lm.params, [ids], observer)]
        total = [_merged(*both) for both in zip(total, read, strict=True)] if total else read
        if progress is not None:
            jax.block_until_ready(total)
            progress(number, len(pieces))
    chosen = [one for layer, one in enumerate(total) if config.window_of(layer) is None]
    return StatisticsProfile(
        model=model_name(lm.name),
        shape=ModelShape.of(for_model(Full(), config).seen_as(config)),
        pieces=len(pieces),
        tokens=sum(map(len, pieces)),
        seed=seed,
        sink=sink,
        means=packed_numbers(np.stack([one.queries.mean for one in chosen]), SINGLE),
        roots=packed_numbers(
            np.stack([lower_roots(np.asarray(one.queries.covariance[0], np.float64)) for one in chosen])
        ),
        anchors=packed_numbers(np.stack([one.keys / one.count for one in chosen]), SINGLE),
    )


def check(*, tokens: int, most: int, sink: int, seed: int) -> None:
    """Refuse (UsageError) numbers that :func:`text_statistics` does not take of any model."""
    whole_number("tokens", tokens, 2)
    whole_number("most", most, 1)
    whole_number("sink", sink, 0, MOST_SLOTS)
    whole_number("seed", seed, 0, MOST_SEED)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer.

    Attributes:
      queries: of one row. keys: [1, H, D] sum of normalised keys. count: how many keys.
    """

    queries: QueryStats
    keys: Float[Array, "1 H D"]
    count: Float[Array, ""]


@jax.jit
def _merged(one: LayerStatistics, other: LayerStatistics) -> LayerStatistics:
    """Statistics of both texts together."""
    return LayerStatistics(one.queries.merge(other.queries), one.keys + other.keys, one.count + other.count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextStatistics(LayerObserver):
    """Observes the statistics of one text's queries before rotary embedding and of its keys as they are cached.

    Attributes:
      count: tokens of the only row. sink: tokens whose queries do not count.
    """

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    count: Int[Array, ""]
    sink: int = dataclasses.field(metadata={"static": True})

    @property
    def _collector(self) -> SignalCollector:
        """Collects the same statistics of a prompt."""
        none = jnp.zeros((1,), jnp.int32)
        scale = jnp.full((1,), self.config.attention_scale, jnp.float32)
        signals = Signals(queries=True, query_skip=self.sink)
        return SignalCollector(signals, self.config, none, self.count[None], none, scale, 0)

    def before_layer(self, layer: DecoderLayer, x: Float[Array, "1 T M"], rope: Angles) -> Any:
        """Nothing."""
        return self._collector.before_layer(layer, x, rope)

    def start(self, kept: KeptTokens | None, tokens: int) -> PartialSignals:
        """Statistics of no query."""
        return self._collector.start(kept, tokens)

    def after_block(self, partial: PartialSignals, *block: Any) -> PartialSignals:
        """The statistics with this block's queries."""
        return self._collector.after_block(partial, *block)

    def finish(
        self, partial: PartialSignals, before: Any, k: Float[Array, "1 H T D"], kept: KeptTokens | None
    ) -> LayerStatistics:
        """The statistics of all tokens."""
        assert partial.stats is not None
        real = jnp.arange(k.shape[2]) < self.count
        keys = jnp.where(real[:, None], unit_keys(k), 0.0).sum(axis=2)
        return LayerStatistics(partial.stats, keys, self.count.astype(jnp.float32))
