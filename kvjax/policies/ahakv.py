"""AhaKV: recent accumulation, step-gain softmax and a value prior."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import slot_bias
from kvjax.cache.pool import LayerCache
from kvjax.checks import MOST_KERNEL, MOST_SLOTS, true_or_false, whole_number
from kvjax.errors import UsageError
from kvjax.model.alibi import slopes
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Candidates, PromptChunk, Signals, Step
from kvjax.policies.evicting import Evicting, attention_weights
from kvjax.policies.option_checks import refuse_unused


@dataclasses.dataclass(frozen=True)
class AhaKV(Evicting):
    """Keep tokens by attention freed of its bias to early positions (Gu et al., arXiv 2506.03762).

    A prompt's token is scored by what it means to the last ``recent`` queries, so that every token is counted equally
    often [5]; their attention is a softmax of ``lambda q.k``, lambda = sqrt(2 log(i / k) / d) for i tokens and a budget
    of k, whose entropy is that of k equal tokens whatever i is [9, 12]; and the sum is weighted by the value prior,
    ``|v|^2`` averaged over ``kernel`` neighbours and divided by the head's largest [13-15]. The top of the scores and
    the last ``recent`` tokens stay. While decoding, every new token adds its attention under the same lambda, without a
    prior, and the lowest score outside the last ``recent`` tokens leaves [Algorithm 1]. What the model attends with is
    never changed.

    Size: ``budget`` tokens a head, the recent ones included (1,000, as in the paper's tables), or ``ratio`` of the
    tokens a row has seen when a prompt is in. ``recent_accumulation``, ``step_gain`` and ``value_prior`` switch the
    three parts off, as the paper's ablation does: without the first all queries count, and later turns add to what kept
    tokens had; without the second the scale is the model's 1 / sqrt(d).

    Decided where the paper is silent or contradicts itself. Dot products are raw: the derivation of [12] takes the
    variance of q.k to be d, so lambda stands in place of 1 / sqrt(d), which Algorithm 1 prints beside it; its line 11
    ranks the score without the prior, [15] with it: with it. ``kernel`` is 5, and windows at the ends average what is
    there. The query heads of a group add up; ties go to the later token. A row of i <= k tokens is left untouched; [12]
    has no lambda for it (the square root of a negative number, or 0, under which all tokens are equal), so it
    accumulates under 1 / sqrt(d), also when it outgrows its budget while decoding. lambda is set when a prompt or a
    later turn is read, i being all tokens the row has seen, and held while decoding.
    """

    layers_alike: ClassVar[bool] = True

    recent: int = 32
    kernel: int = 5
    recent_accumulation: bool = True
    step_gain: bool = True
    value_prior: bool = True

    default: ClassVar[dict[str, Any]] = {"budget": 1000}

    def __post_init__(self) -> None:
        whole_number("recent", self.recent, 1, MOST_SLOTS)
        whole_number("kernel", self.kernel, 1, MOST_KERNEL)
        if self.kernel % 2 == 0:
            raise UsageError(f"kernel is {self.kernel}; give an odd number, so that a window has a centre.")
        for name in ("recent_accumulation", "step_gain", "value_prior"):
            true_or_false(name, getattr(self, name))
        super().__post_init__()

    def check(self, config: ModelConfig) -> None:
        if not self.value_prior:
            refuse_unused(self, ("kernel",), "kernel averages the value prior, which value_prior=False leaves out")

    @property
    def signals(self) -> Signals:
        if self.recent_accumulation:
            return Signals(window=self.recent, decode_logits=True)
        return Signals(columns=True, columns_scaled=True, decode_logits=True)

    def smallest(self) -> int:
        return self.recent + 1

    def window_of(self, budget: Int[Array, " B"]) -> Int[Array, " B"]:
        return jnp.full_like(budget, self.recent)

    def window_scale(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        """lambda [12]: multiplies q.k in the softmax the scores are made of, for rows of ``total`` tokens."""
        return self._gain(config, total) * config.attention_scale

    def _gain(self, config: ModelConfig, total: Int[Array, " B"]) -> Float[Array, " B"]:
        """lambda over 1 / sqrt(d): sqrt(2 log(i / k)), 1 where [12] has no answer."""
        if not self.step_gain:
            return jnp.ones(total.shape, jnp.float32)
        excess = total.astype(jnp.float32) / self.size(config, 0, total)
        return jnp.where(excess > 1, jnp.sqrt(2 * jnp.log(jnp.maximum(excess, 1))), 1.0)

    # --- prompts ----------------------------------------------------------------------------------------------

    def own_state(self, config: ModelConfig, layer: int, batch: int) -> Any:
        return jnp.ones((batch,), jnp.float32)

    def own_after(self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk) -> Any:
        return jnp.where(chunk.count > 0, self._gain(chunk.config, chunk.total), cache.state.own)

    def prompt_scores(
        self, layer: int, cache: LayerCache, candidates: Candidates, chunk: PromptChunk
    ) -> tuple[Float[Array, "B H N"], Float[Array, "B H N"]]:
        mass = candidates.signals.window if self.recent_accumulation else candidates.signals.columns
        assert mass is not None
        scores = mass.sum(axis=2)
        if self.value_prior:
            scores = scores * value_prior(candidates, self.kernel)
        before = candidates.marks["score"]
        if not self.recent_accumulation:
            scores = before + scores
        # A row that reads nothing this time keeps its scores.
        scores = jnp.where((chunk.count > 0)[:, None, None], scores, before)
        return scores, scores

    # --- steps ------------------------------------------------------------------------------------------------

    def gains(self, cache: LayerCache, logits: Float[Array, "B P G R"], step: Step) -> Float[Array, "B P R"]:
        gain = cache.state.own if self.step_gain else None
        if gain is not None and step.config.positional == "alibi":
            # Step gain is for the product of query and key; the bias is what it is, as in the prompt's masses.
            bias = slot_bias(cache, slopes(step.config), step.position)
            logits, gain = gain[:, None, None, None] * (logits - bias) + bias, None
        return attention_weights(cache, logits, gain, step.sink_logits).sum(axis=2)


def value_prior(candidates: Candidates, kernel: int) -> Float[Array, "B H N"]:
    """[13, 14]: squared norms of the values, averaged over ``kernel`` neighbours, over the head's largest average.

    A head whose values are all zero has no prior: 1 everywhere.
    """
    v = candidates.v.astype(jnp.float32)
    # The sum over channels as a product with ones: XLA's CPU reduction over the last axis is scalar code.
    ones = jnp.ones((v.shape[-1],), jnp.float32)
    norms = jnp.matmul(v * v, ones, precision=jax.lax.Precision.HIGHEST)
    valid = candidates.valid.astype(jnp.float32)
    mean = _window_sum(norms * valid, kernel) / jnp.maximum(_window_sum(valid, kernel), 1)
    mean = mean * valid
    largest = mean.max(axis=-1, keepdims=True)
    return jnp.where(largest > 0, mean / jnp.where(largest > 0, largest, 1.0), 1.0)


def _window_sum(x: Float[Array, "B H N"], kernel: int) -> Float[Array, "B H N"]:
    """Sums over windows of ``kernel`` centred on each place; nothing beyond the ends."""
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, kernel), (1, 1, 1), "SAME")
