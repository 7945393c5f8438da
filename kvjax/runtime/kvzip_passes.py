"""Inputs and observers of the passes that repeat a prompt (KVzip, arXiv 2505.23416); see kvzip_prefill.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buckets import keys_of, prompt_bucket
from kvjax.model.alibi import query_bias
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import DecoderLayer
from kvjax.policies.signals import Repetition
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.attention_mass import log_sum_exp
from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.softmax import capped, merge_log

#: A place that is no token's: of the words of a request.
_NOWHERE = np.iinfo(np.int32).min // 2


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes over prompts padded to ``tokens``, of which each row has ``count`` after ``seen``.

    Attributes:
      asked: how they are repeated. size: tokens of a chunk, at most. width: of a pass, its request included.
    """

    asked: Repetition
    prompts: Int[Array, "B T"]
    seen: Int[Array, " B"]
    count: Int[Array, " B"]

    @property
    def size(self) -> int:
        return min(self.asked.chunk, self.prompts.shape[1])

    @property
    def width(self) -> int:
        return prompt_bucket(self.size + max(self.asked.request_tokens))

    @property
    def most(self) -> int:
        """Passes that a row of every token takes."""
        return -(-self.prompts.shape[1] // self.size)

    @property
    def number(self) -> Int[Array, ""]:
        """Passes that the longest row takes."""
        return (jnp.max(self.count) + self.size - 1) // self.size

    def empty_peak(self, layer: DecoderLayer, k: Float[Array, "B H T D"]) -> Float[Array, "B H S"] | None:
        """Each key's largest probability before the first pass; None of a layer with a window, whose keys all stay."""
        if layer.config.window is not None:
            return None
        return jnp.zeros((*k.shape[:2], self.most * self.size), jnp.float32)

    def of(self, i: Int[Array, ""]) -> tuple[Int[Array, "B W"], Int[Array, " B"], Int[Array, " B"]]:
        """Pass ``i``: what is fed, how many tokens of each row, and how many of these are the chunk's."""
        chunk = jnp.clip(self.count - i * self.size, 0, self.size)
        (ids, place), later = self._request(first=True), self._request(first=False)
        ids, place = (jnp.where(i == 0, one, other) for one, other in zip((ids, place), later, strict=True))
        source = jnp.clip(i * self.size + place, 0, self.prompts.shape[1] - 1)
        fed = jnp.where(place == _NOWHERE, ids, jnp.maximum(self.prompts[:, source], 0))
        request = jnp.where(i == 0, *self.asked.request_tokens)
        return fed, jnp.where(chunk > 0, request + chunk, 0), chunk

    def _request(self, first: bool) -> tuple[np.ndarray, np.ndarray]:
        """[W] ids of a request's words, and of each token fed its place from the chunk's first on."""
        asked = self.asked
        opening, overlap = (asked.first, 0) if first else (asked.later, asked.overlap)
        words = [*opening, *[0] * overlap, *asked.end]
        place = [_NOWHERE] * len(opening) + [*range(-overlap, 0)] + [_NOWHERE] * len(asked.end)
        rest = self.width - len(words)
        return np.array([*words, *[0] * rest], np.int32), np.array([*place, *range(rest)], np.int32)

    def collector(
        self, i: Int[Array, ""], held: KeptTokens, fed: Int[Array, " B"], chunk: Int[Array, " B"], layer: DecoderLayer
    ) -> RepetitionCollector:
        """The observer of pass ``i`` in a layer that holds these rows."""
        first = held.length - self.count[:, None] + i * self.size  # of the chunk, among the layer's rows
        sink = jnp.minimum(self.asked.sink, first)
        block = keys_of(self.width)
        order = jnp.arange(-(-(self.size + self.asked.sink) // block) * block)
        source = jnp.where(order < sink[..., None], order, first[..., None] + order - sink[..., None])
        source = jnp.clip(source, 0, held.k.shape[2] - 1)
        k = jnp.take_along_axis(held.k, source[..., None], axis=2)
        place = None if held.position is None else jnp.take_along_axis(held.position, source, axis=2)
        rows = KeptTokens(k, k, sink + chunk[:, None], None, place, block)
        sink_logits = layer.sink_logits
        if sink_logits is not None:
            sink_logits = jnp.broadcast_to(sink_logits, (len(chunk), *sink_logits.shape))
        return RepetitionCollector(layer.config, self.size, rows, sink, fed, chunk, sink_logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepetitionCollector(LayerObserver):
    """The largest attention probability that a chunk's keys get from any query of its pass, of any head of the group
    (equation 2).

    Of the group at once: an axis of it would be the innermost on a TPU, where 4 numbers take as much as 128.

    Attributes:
      rows: keys of the first tokens, then of the chunk. sink: how many of each head's are not the chunk's.
      size: of the longest chunk. count: tokens of each row that are fed. chunk: of which are repeated.
      sink_logits: logits of the softmaxes that belong to no key, or None.
    """

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    size: int = dataclasses.field(metadata={"static": True})
    rows: KeptTokens
    sink: Int[Array, "B H"]
    count: Int[Array, " B"]
    chunk: Int[Array, " B"]
    sink_logits: Float[Array, "B H G"] | None = None

    def start(self, kept: KeptTokens | None, tokens: int) -> Float[Array, "B H S"]:
        """No query yet."""
        return jnp.zeros(self.rows.k.shape[:3], jnp.float32)

    def after_block(
        self,
        partial: Float[Array, "B H S"],
        raw: Float[Array, "B N H G D"],
        q: Float[Array, "B H G N D"],
        normaliser: Float[Array, "B H G N"],
        k: Float[Array, "B H T D"],
        kept: KeptTokens | None,
        index: Int[Array, ""],
    ) -> Float[Array, "B H S"]:
        """The same after one block of queries."""
        c, block = self.config, raw.shape[1]
        token = index * block + jnp.arange(block)
        bias = query_bias(c, jnp.tile(token, c.group_size)[None])
        scored: dict[str, Any] = {"scale": c.attention_scale, "soft_cap": c.attention_soft_cap, "bias": bias}
        lse = log_sum_exp(q, k, offset=index * block, kept=self.rows, block=keys_of(block), **scored)
        if self.sink_logits is not None:
            lse = merge_log(lse, self.sink_logits[..., None])
        lse = jnp.where((token < self.count[:, None])[:, None, None], lse, jnp.inf)  # padding gives nothing
        return attention_peak(q, lse, self.rows, onto=partial, **scored)

    def finish(
        self, partial: Float[Array, "B H S"], before: Any, k: Float[Array, "B H T D"], kept: KeptTokens | None
    ) -> Float[Array, "B H C"]:
        """The chunk's alone; 0 beyond its end."""
        order = jnp.arange(self.size)
        own = jnp.take_along_axis(partial, self.sink[..., None] + order, axis=2)
        return jnp.where(order < self.chunk[:, None, None], own, 0.0)


def attention_peak(
    q: Float[Array, "B H G N D"],
    lse: Float[Array, "B H G N"],
    rows: KeptTokens,
    *,
    scale: float,
    soft_cap: float | None,
    bias: Bias | None,
    onto: Float[Array, "B H S"],
) -> Float[Array, "B H S"]:
    """The largest attention probability that each row gets from any of these queries, or that it had before.

    Args:
      lse: log-sum-exp of each query's scores; infinite of one that does not count.
      rows: a block of their keys is scored at a time. onto: what is larger stays.
    """
    exact = jax.lax.Precision.HIGHEST

    def block(i: Int[Array, ""], best: Float[Array, "B H S"]) -> Float[Array, "B H S"]:
        k, _, visible, linear = rows.block_of(i, bias)
        score = jnp.einsum("bhgnd,bhsd->bhgns", *(x.astype(jnp.float32) for x in (q, k)), precision=exact) * scale
        score = capped(score, soft_cap)
        if linear is not None:
            score = score + linear.reshape(-1, *score.shape[1:])
        weight = jnp.where(visible[:, :, None], jnp.exp(jnp.minimum(score - lse[..., None], 0.0)), 0.0).max(axis=(2, 3))
        here = jax.lax.dynamic_slice_in_dim(best, i * rows.block, rows.block, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(best, jnp.maximum(here, weight), i * rows.block, axis=2)

    return jax.lax.fori_loop(0, rows.blocks, block, onto)
