"""The places in a decoder at which devices that run it together exchange numbers; one device exchanges nothing."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kvjax.model.config import ModelConfig
from kvjax.model.quantised import Quantised, rows_of


class Exchange:
    """Hooks of a decoder and of its layers, here those of a model on one device.

    ``kvjax.sharding.exchange`` replaces them by collectives. A block feature (a bias, a norm, an activation) belongs to
    the decoder alone: hooks see a projection's columns before its bias and a product's sum before its bias.
    """

    def heads(self, qkv: Float[Array, "*S N"]) -> Array:
        """All columns of this device's KV heads, [..., H x (G + 2) x D], from the columns that its weights give."""
        return qkv

    def first_column(self, count: int) -> Int[Array, ""] | int:
        """The number of the first of this device's columns of queries, keys and values, of which there are so many."""
        return 0

    def sum_columns(self, parts: list[Array]) -> list[Array]:
        """Sums over all columns of queries, keys and values, from those over this device's."""
        return parts

    def whole(self, config: ModelConfig) -> ModelConfig:
        """The model with the heads of all devices, from a layer's view of it."""
        return config

    def own_heads(self, every: Float[Array, "N C"]) -> Float[Array, "H C"]:
        """Select from an array of all KV heads those that this device attends for, in their order."""
        return every

    def attended(self, attended: Float[Array, "*S H G D"]) -> Array:
        """The channels that this device's rows of the output projection multiply, from the results of its heads."""
        return attended

    def output_rows(self, rows: Float[Array, "N M"]) -> Float[Array, "K M"]:
        """The output projection's rows of all heads, from those of this device."""
        return rows

    def output(self, y: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        """The output projection's result, from what this device's rows of it give."""
        return y

    def mlp(self, y: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        """The MLP's result, from what this device's channels of it give."""
        return y

    def embed(self, table: Float[Array, "V M"] | Quantised, tokens: Int[Array, "*S"]) -> Float[Array, "*S M"]:
        """Each token's row of the embedding, of which this device holds the rows of ``table``."""
        return rows_of(table, tokens)

    def logits(self, logits: Float[Array, "*S N"]) -> Float[Array, "*S V"]:
        """All the vocabulary's logits, from those of this device's columns of the head."""
        return logits


#: The exchange of a model on one device.
ONE_DEVICE = Exchange()
