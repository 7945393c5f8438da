"""Choosing the next token inside the compiled loop; every parameter is traced, so none of them recompiles."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.softmax import NEG


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters, scalars unless said otherwise.

    Attributes:
      temperature: 0 is greedy.
      top_k: how many of the best tokens take part; the vocabulary's size is no limit.
      top_p: the smallest set of best tokens with at least this probability takes part; 1 is no limit.
      min_p: tokens below this share of the best one's probability do not take part; 0 is no limit.
      repetition_penalty: divides positive and multiplies negative logits of tokens already there (CTRL); 1 is none.
      keys: [B] one random key a row.
    """

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    repetition_penalty: Float[Array, ""]
    keys: Array


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, present: Bool[Array, "B V"], made: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Next token of every row.

    Args:
      logits: float32 scores.
      sampling: parameters; ``made`` numbers the row's tokens, so that its choices depend on its key alone.
      present: tokens the row already holds, for the repetition penalty.
      made: [B] tokens generated so far.

    Returns:
      [B] int32. Greedy ties go to the lowest id.
    """
    penalty = sampling.repetition_penalty

    def penalise(x: Array) -> Array:
        return jnp.where(present, jnp.where(x > 0, x / penalty, x * penalty), x)

    logits = jax.lax.cond(penalty != 1.0, penalise, lambda x: x, logits)
    return jax.lax.cond(sampling.temperature > 0, lambda x: _draw(x, sampling, made), argmax, logits)


def argmax(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Lowest index of the highest value, by two plain reductions: XLA's CPU argmax runs on one core, 4x slower."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = jnp.where(logits == logits.max(axis=-1, keepdims=True), ids, logits.shape[-1] - 1)
    return best.min(axis=-1)


def _draw(logits: Float[Array, "B V"], sampling: Sampling, made: Int[Array, " B"]) -> Int[Array, " B"]:
    """Temperature, then top-k, top-p and min-p, then one draw a row (Gumbel-max)."""
    # Relative to the best one: a temperature next to 0 must not make several logits infinite.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / jnp.maximum(sampling.temperature, 1e-30)
    vocabulary = logits.shape[-1]
    ranked = (sampling.top_k < vocabulary) | (sampling.top_p < 1.0)
    logits = jax.lax.cond(ranked, lambda x: _keep_best(x, sampling), lambda x: x, logits)
    logits = jnp.where(logits < jnp.log(sampling.min_p), NEG, logits)  # the best is 0; log 0 is -inf: no limit
    keys = jax.vmap(jax.random.fold_in)(sampling.keys, made)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,)))(keys)
    return argmax(logits + noise)


def _keep_best(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Mask what is below the row's top-k and top-p threshold; ties with the threshold stay."""
    ordered = -jnp.sort(-logits, axis=-1)
    best_k = jnp.arange(logits.shape[-1]) < sampling.top_k
    probability = jax.nn.softmax(jnp.where(best_k, ordered, NEG), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The sum may round to 1 before the last token; 1 is no limit.
    taken = best_k & ((before < sampling.top_p) | (sampling.top_p >= 1))
    threshold = jnp.where(taken, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < threshold, NEG, logits)


def log_probability(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """Natural log of the model's probability of each row's token, before any sampling parameter."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
