"""The base of what observes a layer while a prompt is read through it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from kvjax.model.decoder import DecoderLayer
from kvjax.model.rope import Angles
from pallas_kernels.kept_tokens import KeptTokens


class LayerObserver:
    """Sees one layer's hidden states, queries and keys while ``read_layer`` (``prefill_layer.py``) computes them.

    A subclass overrides what it needs; all of it is traced, so nothing but arrays may differ from call to call.
    """

    def before_layer(self, layer: DecoderLayer, x: Float[Array, "B T M"], rope: Angles) -> Any:
        """Take something from the hidden states that the layer is about to read; ``finish`` is given it."""
        return None

    def start(self, kept: KeptTokens | None, tokens: int) -> Any:
        """Arrays to accumulate into over the blocks of queries; None to skip ``after_block``.

        Args:
          kept: keys and values from before this prompt.
          tokens: of the padded prompt.
        """
        return None

    def after_block(
        self,
        partial: Any,
        raw: Float[Array, "B S H G D"],
        q: Float[Array, "B H G S D"],
        normaliser: Float[Array, "B H G S"],
        k: Float[Array, "B H T D"],
        kept: KeptTokens | None,
        index: Int[Array, ""],
    ) -> Any:
        """The accumulated value after the block of this index.

        Args:
          partial: what was accumulated before it.
          raw, q: the block's queries before and after rotary embedding.
          normaliser: log-sum-exp of each query's logits, its head's sink among them where the model has such.
          k: the layer's keys, those of later blocks still zero.
        """
        return partial

    def finish(self, partial: Any, before: Any, k: Float[Array, "B H T D"], kept: KeptTokens | None) -> Any:
        """The observation of the layer, from what was accumulated, what ``before_layer`` took, and all its keys."""
        raise NotImplementedError
