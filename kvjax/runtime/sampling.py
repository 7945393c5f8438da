"""Choosing the next token inside the compiled loop; every parameter is traced, so none of them recompiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.softmax import NEG


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters of every row.

    Attributes:
      temperature: 0 is greedy.
      top_k: how many of the best tokens take part; the vocabulary's size is no limit.
      top_p: the smallest set of best tokens with at least this probability takes part; 1 is no limit.
      min_p: tokens below this fraction of the best one's probability do not take part; 0 is no limit.
      repetition_penalty: divides positive and multiplies negative logits of tokens already there (CTRL); 1 is none.
      known: ids that the tokenizer knows; those from there on, rows that pad an embedding, are never drawn.
      draws: [B, 3] what each row draws by: the seed, the prompt's number, the sample's.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    known: Int[Array, ""]
    draws: UInt32[Array, "B 3"]

    @classmethod
    def greedy(cls, rows: int, vocabulary: int) -> Sampling:
        """The best token of every row, with every other option off."""
        return cls(
            temperature=jnp.zeros(rows, jnp.float32),
            top_k=jnp.full(rows, vocabulary, jnp.int32),
            top_p=jnp.ones(rows, jnp.float32),
            min_p=jnp.zeros(rows, jnp.float32),
            repetition_penalty=jnp.ones(rows, jnp.float32),
            known=jnp.int32(vocabulary),
            draws=jnp.stack([jnp.zeros(rows), jnp.arange(rows), jnp.zeros(rows)], axis=1).astype(jnp.uint32),
        )


def numbers_of(options: Any, vocabulary: int) -> dict[str, Any]:
    """A row's fields of :class:`Sampling` that ``kvjax.GenerationOptions`` decide, by name."""
    return {
        "temperature": _float32(options.temperature),
        "top_k": np.int32(min(options.top_k or vocabulary, vocabulary)),
        "top_p": np.float32(options.top_p),
        "min_p": np.float32(options.min_p),
        "repetition_penalty": _float32(options.repetition_penalty),
    }


def _float32(value: float) -> np.float32:
    """A number in float32; what float32 cannot hold becomes its largest or smallest."""
    limits = np.finfo(np.float32)
    return np.float32(0.0 if value == 0 else min(max(value, float(limits.tiny)), float(limits.max)))


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
    penalty, drawn = sampling.repetition_penalty[:, None], sampling.temperature[:, None] > 0

    def known(x: Array) -> Array:
        return jnp.where(jnp.arange(x.shape[-1]) < sampling.known, x, NEG)

    def prepared(x: Array) -> Array:
        x = known(x)
        x = jnp.where(present, jnp.where(x > 0, x / penalty, x * penalty), x)
        # Relative to the best one: a temperature next to 0 must not make several logits infinite.
        scaled = (x - x.max(axis=-1, keepdims=True)) / jnp.maximum(sampling.temperature[:, None], 1e-30)
        return jnp.where(drawn, scaled, x)

    def noisy(x: Array) -> Array:
        return jnp.where(drawn, _noisy(x, sampling, made), x)

    # In steps that need little beside the logits: what a branch makes lies in memory beside what it is made from.
    logits = jax.lax.cond((drawn | (penalty != 1.0)).any(), prepared, lambda x: x, logits)
    # A greedy step compares what it may draw without a copy: the comparison is a part of the reductions.
    return argmax(known(jax.lax.cond(drawn.any(), noisy, lambda x: x, logits)))


def argmax(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Lowest index of the highest value, by two plain reductions: XLA's CPU argmax runs on one core, 4x slower."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    best = jnp.where(logits == logits.max(axis=-1, keepdims=True), ids, logits.shape[-1] - 1)
    return best.min(axis=-1)


def _noisy(logits: Float[Array, "B V"], sampling: Sampling, made: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Top-k, top-p and min-p, then noise with which the highest is one draw a row (Gumbel-max). The best logit is 0."""
    vocabulary = logits.shape[-1]
    ranked = ((sampling.top_k < vocabulary) | (sampling.top_p < 1.0)).any()
    least = jax.lax.cond(
        ranked, lambda x: _threshold(x, sampling), lambda x: jnp.full((x.shape[0], 1), -jnp.inf, x.dtype), logits
    )
    # Ties with the threshold stay. Of the best the logarithm is 0; log 0 is -inf: no limit.
    logits = jnp.where(logits < jnp.maximum(least, jnp.log(sampling.min_p)[:, None]), NEG, logits)
    keys = _keys(sampling.draws, made)
    return logits + jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,), logits.dtype))(keys)


def _keys(draws: UInt32[Array, "B 3"], made: Int[Array, " B"]) -> Array:
    """The random key of each row's next token: the seed's, into which the other numbers are folded one by one.

    In a loop, whose body is compiled once: written out, the foldings were an eighth of what a small model's decode
    loop takes to compile.
    """
    seed, *others = draws.T

    def fold(keys: Array, number: Array) -> tuple[Array, None]:
        return jax.vmap(jax.random.fold_in)(keys, number), None

    return jax.lax.scan(fold, jax.vmap(jax.random.key)(seed), jnp.stack([*others, made.astype(jnp.uint32)]))[0]


def _threshold(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B 1"]:
    """The lowest logit of the row's top k and top p; the best one is 0.

    Found bit by bit, each by a sum over the vocabulary, and nothing is sorted: of 8 x 49,152 logits on 2 CPU cores 3 to
    6 ms where a sort takes 66, and no copy of them.
    """
    top_k, top_p = jnp.clip(sampling.top_k, 1, logits.shape[-1])[:, None], sampling.top_p[:, None]

    def mass(better: Array) -> Array:
        return jnp.sum(jnp.where(better, jnp.exp(logits), 0.0), axis=-1, keepdims=True)

    kth = _lowest(logits, lambda better: better.sum(axis=-1, keepdims=True, dtype=jnp.int32) < top_k)
    better = logits > kth
    # Of those equal to the k-th, as many count as make k.
    ties = top_k - better.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    wanted = top_p * (mass(better) + ties * jnp.exp(kth))
    last = _lowest(logits, lambda better: mass(better) < wanted)
    # The sum may round to 1 before the last token; 1 is no limit. ``last`` may be no number, where sums never reach it.
    return jnp.where((top_p < 1) & (last > kth), last, kth)


def _lowest(
    logits: Float[Array, "B V"], few: Callable[[Bool[Array, "B V"]], Bool[Array, "B 1"]]
) -> Float[Array, "B 1"]:
    """The lowest value of which ``few(logits > value)`` holds; the logits are at most 0.

    Their bits without the sign are whole numbers in the order of their distance from 0.
    """

    def value(bits: Array) -> Array:
        return -jax.lax.bitcast_convert_type(bits, jnp.float32)

    def bit(i: Array, found: Array) -> Array:
        further = found | (jnp.int32(1 << 30) >> i)
        # Beyond infinity is not a number, and every logit is above it.
        return jnp.where(few(~(logits <= value(further))), further, found)

    return value(jax.lax.fori_loop(0, 31, bit, jnp.zeros((logits.shape[0], 1), jnp.int32)))


def log_probability(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """Natural log of the model's probability of each row's token, before any sampling parameter."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
