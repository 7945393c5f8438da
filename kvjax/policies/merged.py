"""Merged: the values of tokens that leave are merged into those of the most similar tokens that stay."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pool import LayerCache
from kvjax.checks import number
from kvjax.policies.base import Candidates, PromptChunk, Selection
from kvjax.policies.candidates import most_kept, places_of
from kvjax.policies.inner import Rescoring
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.sized import Scoring, Selecting

#: Candidates that are compared with all kept keys at a time.
_BLOCK = 128
#: What norms are at least.
_LEAST = 1e-6


@dataclasses.dataclass(frozen=True)
class Merged(Rescoring):
    """Merge what leaves into what stays: each evicted token's value into that of its most similar kept key.

    ``inner``, any policy that scores tokens once a prompt, decides what stays: KeyDiff, unless another is given; over
    :class:`AdaptiveHeads` the heads of a layer share its budget. An evicted token e of a head is merged into its kept
    token t whose key has the highest cosine similarity s = cos(k_e, k_t), if s >= ``threshold``, with the weight

        w_e = s ||v_e|| / (||v_e|| + ||v_t||),    v_t <- (v_t + sum_e w_e v_e) / (1 + sum_e w_e),

    the sums over all e merged into t. Keys stay as they are, and no slot is added: bytes are the inner policy's. With
    ``threshold=1`` nothing but keys of the same direction is merged.

    The rule is ``MergingPress`` of NVIDIA's kvpress, after D2O (arXiv 2406.13035) and Token Merging (2210.09461); D2O
    itself merges keys too, by weights exp(s), and moves its threshold from step to step. Its authors compare keys;
    here as in kvpress these are keys after rotary embedding, so that similar ones are near each other. Of equally
    similar kept keys the earliest is taken. Merged once a prompt; on a later turn kept values, with what they have
    taken in, count as one token each. int8 values are quantised again when they have changed.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens; none in ``inner``.
    The cost is a product of the prompt's keys with the kept ones, at each prompt.
    """

    layers_alike: ClassVar[bool] = True

    threshold: float = 0.0

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0, 1)
        super().__post_init__()

    def usual(self) -> Selecting:
        return KeyDiff()

    def takes(self, inner: Scoring) -> bool:
        return isinstance(inner, Selecting) and not inner.changes_while_decoding and not isinstance(inner, Merged)

    @property
    def shares_slots(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the inner policy divides a layer's slots among its heads."""
        return self.scoring.shares_slots

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        return self.inner_scores(layer, cache, candidates, chunk)

    def select(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Selection:
        chooses = dataclasses.replace(self.scoring, keep_turn=self.keep_turn)
        chosen = chooses.select(layer, cache, candidates, chunk)
        source, length = places_of(chosen.keep, most_kept(cache, candidates, chunk))
        v = merged_values(candidates, chosen.keep, source, length, self.threshold)
        return dataclasses.replace(chosen, v=v)


def merged_values(
    candidates: Candidates,
    keep: Bool[Array, "B H N"],
    source: Int[Array, "B H S"],
    length: Int[Array, "B H"],
    threshold: float,
) -> Float[Array, "B H N D"]:
    """The candidates' values, those of kept ones with what was merged into them.

    Args:
      source, length: the kept candidates in order, and how many there are.
    """
    evicted, k, v = candidates.valid & ~keep, candidates.k, candidates.v
    slot = jnp.where(keep, jnp.cumsum(keep, axis=-1) - 1, 0)
    last = (candidates.length.max() + _BLOCK - 1) // _BLOCK

    def head(given: tuple[Array, ...]) -> Array:
        return _merged_head(*given, last=last, threshold=threshold)

    def all_heads() -> Array:
        by_head = (x.swapaxes(0, 1) for x in (k, v, evicted, keep, slot, source, length))
        return jax.lax.map(head, tuple(by_head)).swapaxes(0, 1)

    return jax.lax.cond(evicted.any(), all_heads, lambda: v)


def _merged_head(
    k: Float[Array, "B N D"],
    v: Float[Array, "B N D"],
    evicted: Bool[Array, "B N"],
    keep: Bool[Array, "B N"],
    slot: Int[Array, "B N"],
    source: Int[Array, "B S"],
    length: Int[Array, " B"],
    *,
    last: Int[Array, ""],
    threshold: float,
) -> Float[Array, "B N D"]:
    """:func:`merged_values` of one head, a block of candidates at a time."""
    exact = jax.lax.Precision.HIGHEST
    tokens, slots = k.shape[1], source.shape[1]
    block = min(_BLOCK, tokens)
    kept_k = _unit(jnp.take_along_axis(k, source[..., None], axis=1))
    kept_v = jnp.take_along_axis(v, source[..., None], axis=1).astype(jnp.float32)
    kept_norm = jnp.linalg.norm(kept_v, axis=-1)
    held = jnp.arange(slots) < length[:, None]

    def merge(i: Int[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        start = jnp.minimum(i * block, tokens - block)  # the last block goes over some of the one before again
        own_k, own_v, leaves = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (k, v, evicted))
        leaves = leaves & (start + jnp.arange(block) >= i * block)
        similar = jnp.einsum("bnd,bsd->bns", _unit(own_k), kept_k, precision=exact)
        similar = jnp.where(held[:, None], similar, -jnp.inf)
        most, target = similar.max(axis=-1), similar.argmax(axis=-1)
        own_v = own_v.astype(jnp.float32)
        norm = jnp.linalg.norm(own_v, axis=-1)
        part = norm / (norm + jnp.take_along_axis(kept_norm, target, axis=1) + _LEAST)
        weight = jnp.where(leaves & (most >= threshold), most * part, 0.0)
        onto = jnp.where(target[..., None] == jnp.arange(slots), weight[..., None], 0.0)
        values, weights = sums
        return values + jnp.einsum("bns,bnd->bsd", onto, own_v, precision=exact), weights + onto.sum(axis=1)

    none = 0 * kept_v, 0 * kept_norm  # on a mesh they differ from device to device, as what is added does
    values, weights = jax.lax.fori_loop(0, last, merge, none)
    merged = (kept_v + values) / (1 + weights[..., None])
    changed = keep & (jnp.take_along_axis(weights, slot, axis=1) > 0)
    merged = jnp.take_along_axis(merged, slot[..., None], axis=1)
    return jnp.where(changed[..., None], merged.astype(v.dtype), v)


def _unit(k: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
    """Keys of length 1, in float32."""
    k = k.astype(jnp.float32)
    return k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), _LEAST)
