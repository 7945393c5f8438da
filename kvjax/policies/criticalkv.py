"""CriticalKV: what attention finds first, then what would change the output most (Feng et al., arXiv 2502.03805)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache.pool import LayerCache
from kvjax.checks import number
from kvjax.errors import UsageError
from kvjax.policies.base import Candidates, PromptChunk, Signals, floor_fraction, top_mask
from kvjax.policies.inner import Rescoring
from kvjax.policies.sized import Selecting
from kvjax.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class CriticalKV(Rescoring):
    """Keep tokens by attention, then by what their values add to the output too (arXiv 2502.03805, algorithm 1).

    ``inner`` is any policy that scores tokens by attention: SnapKV, unless another is given. The ``first`` part of a
    head's budget goes to the highest of its scores, with what it protects; the rest to the highest product of (score +
    ``epsilon``) and the L1 norm of what the output projection makes of the value, the mean over a group's query heads.

    Size: ``budget`` tokens a head (2,048 when nothing is given) or ``ratio`` of the row's tokens; none in ``inner``.
    Defaults are those of NVIDIA's kvpress. Chosen once a prompt; on a later turn decoded tokens, whose products nobody
    has computed, have the average norm.
    """

    layers_alike: ClassVar[bool] = True
    attention_scores: ClassVar[bool] = True
    takes_such: ClassVar[str] = "SnapKV"

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        number("first", self.first, 0, 1)
        number("epsilon", self.epsilon, 0)
        super().__post_init__()
        if not self._inner.attention_scores:
            raise UsageError(
                f"{type(self._inner).__name__} does not score by attention, which CriticalKV multiplies; give it an "
                "inner such as SnapKV, ExpectedAttention or KVzip."
            )

    def usual(self) -> Selecting:
        return SnapKV()

    @property
    def signals(self) -> Signals:
        return dataclasses.replace(self.scoring.signals, outputs=True)

    @property
    def marks(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inner policy's numbers of each slot, and the norm of its product."""
        return (*self.scoring.marks, "output_norm")

    def marks_after(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> dict[str, Array]:
        assert candidates.signals.outputs is not None
        norm = jnp.where(
            candidates.fresh_rows, candidates.signals.outputs.mean(axis=2), candidates.marks["output_norm"]
        )
        return {**super().marks_after(layer, cache, candidates, chunk), "output_norm": norm}

    def chosen_first(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Bool[Array, "B H N"]:
        return self._stages(layer, cache, candidates, chunk)[0]

    def scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> Float[Array, "B H N"]:
        chosen, scores, second = self._stages(layer, cache, candidates, chunk)
        return jnp.where(chosen, second.max(axis=-1, keepdims=True) + 1 + scores, second)

    def _stages(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> tuple[Bool[Array, "B H N"], Float[Array, "B H N"], Float[Array, "B H N"]]:
        """The candidates that the first stage keeps, its scores, and those of the second."""
        scores = self.inner_scores(layer, cache, candidates, chunk)
        if self.scoring.log_scores:
            scores = jnp.exp(scores)
        sure = self.protected(candidates, chunk) & candidates.valid
        free = candidates.valid & ~sure
        most = floor_fraction(self.first, self.size(chunk.config, layer, chunk.total))[:, None]
        chosen = top_mask(scores, jnp.maximum(most - sure.sum(axis=-1, dtype=jnp.int32), 0), free)
        norm = self.marks_after(layer, cache, candidates, chunk)["output_norm"]
        known = candidates.valid & (norm > 0)
        mean = jnp.where(known, norm, 0.0).sum(axis=-1, keepdims=True)
        norm = jnp.where(known, norm, mean / jnp.maximum(known.sum(axis=-1, keepdims=True), 1))
        return chosen, scores, jnp.where(free, (scores + self.epsilon) * norm, 0.0)
