"""Query filters of a model (Q-Filters, arXiv 2503.02812, section 3): the direction that each head's queries share.

Texts are read piece by piece, one layer at a time. Of each query head only two sums are kept, of its queries after
rotary embedding and of their products with themselves; the first right singular vector of all queries is the largest
eigenvector of the latter. An eigenvector's sign is arbitrary, and scores of keys depend on it: it is chosen so that the
product with the queries' mean is positive.
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
from kvjax.checks import whole_number
from kvjax.model.config import ModelConfig
from kvjax.policies.full import Full
from kvjax.policies.profile import FilterProfile, ModelShape, model_name
from kvjax.policies.window_layers import for_model
from kvjax.runtime.layer_forward import forward_layers
from kvjax.runtime.layer_observer import LayerObserver
from pallas_kernels.kept_tokens import KeptTokens


def query_filters(
    lm: LanguageModel,
    texts: Sequence[str],
    *,
    tokens: int = 1024,
    most: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> FilterProfile:
    """The filter of every KV head of a model, of its global layers where others have a window.

    Args:
      lm: the model.
      texts: what it reads; each is cut into pieces.
      tokens: of a piece, or what fits the model's context. most: pieces.
      progress: called after each piece with the pieces done and their number.

    Raises:
      UsageError: no text, or a model without global layers.
    """
    check_model(lm)
    config = lm.config
    whole_number("tokens", tokens, 2)
    whole_number("most", most, 1)
    pieces = sorted(pieces_of(lm, texts, tokens), key=len, reverse=True)[:most]
    total: list[Any] = []
    for number, ids in enumerate(pieces, 1):
        observer = QuerySums(config, jnp.int32(len(ids)))
        layers = [found for _, found in forward_layers(lm.params, [ids], observer)]
        found = [[np.asarray(x, np.float64) for x in pair] for pair in layers]
        total = jax.tree.map(np.add, total, found) if total else found
        if progress is not None:
            progress(number, len(pieces))
    chosen = [pair for layer, pair in enumerate(total) if config.window_of(layer) is None]
    return FilterProfile(
        model=model_name(lm.name),
        shape=ModelShape.of(for_model(Full(), config).seen_as(config)),
        pieces=len(pieces),
        tokens=sum(map(len, pieces)),
        filters=tuple(tuple(round(float(x), 5) for x in filters_of(*pair).ravel()) for pair in chosen),
    )


def filters_of(mean: Float[np.ndarray, "H G D"], product: Float[np.ndarray, "H G D D"]) -> Float[np.ndarray, "H D"]:
    """Each KV head's filter, from the sums over its queries."""
    _, vectors = np.linalg.eigh(product)  # ascending
    first = vectors[..., -1]
    side = np.where((first * mean).sum(axis=-1, keepdims=True) < 0, -1.0, 1.0)
    return (side * first).mean(axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuerySums(LayerObserver):
    """Observes the sum of each head's queries after rotary embedding, and of their products with themselves.

    Attributes:
      count: tokens of the only row.
    """

    config: ModelConfig = dataclasses.field(metadata={"static": True})
    count: Int[Array, ""]

    def start(self, kept: KeptTokens | None, tokens: int) -> tuple[Array, Array]:
        """Sums over no query."""
        c = self.config
        zeros = jnp.zeros((c.num_kv_heads, c.group_size, c.head_dim), jnp.float32)
        return zeros, jnp.zeros((*zeros.shape, c.head_dim), jnp.float32)

    def after_block(
        self,
        partial: tuple[Array, Array],
        raw: Float[Array, "1 S H G D"],
        q: Float[Array, "1 H G S D"],
        normaliser: Float[Array, "1 H G S"],
        k: Float[Array, "1 H T D"],
        kept: KeptTokens | None,
        index: Int[Array, ""],
    ) -> tuple[Array, Array]:
        """The sums with those of this block's tokens."""
        block = q.shape[3]
        real = index * block + jnp.arange(block) < self.count
        wide = jnp.where(real[:, None], q[0].astype(jnp.float32), 0.0)
        product = jnp.einsum("hgsd,hgse->hgde", wide, wide, precision=jax.lax.Precision.HIGHEST)
        return partial[0] + wide.sum(axis=2), partial[1] + product

    def finish(self, partial: tuple[Array, Array], before: Any, k: Array, kept: KeptTokens | None) -> Any:
        """The sums over all."""
        return partial
