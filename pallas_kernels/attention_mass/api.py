"""``log_sum_exp`` and ``attention_mass``: two passes over the keys that sum a set of queries' attention by key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import argument_checks, dispatch
from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem
from pallas_kernels.kept_tokens import Bias, KeptTokens
from pallas_kernels.softmax import per_row

#: Keys that the XLA form reads at once by default.
BLOCK = 256


_ORDER = {"cpu": ("native",), "tpu": ("tpu",), "gpu": ("triton",)}
LOG_SUM_EXP = dispatch.Implementations("log_sum_exp", "pallas_kernels.attention_mass", "log_sum_exp", _ORDER)
ATTENTION_MASS = dispatch.Implementations("attention_mass", "pallas_kernels.attention_mass", "attention_mass", _ORDER)


def log_sum_exp(
    q: Float[Array, "B H G N D"],
    k: Float[Array, "B H T D"],
    *,
    offset: Int[Array, ""] | Int[Array, " B"] | int,
    scale: float | Float[Array, " B"],
    kept: KeptTokens | None = None,
    bias: Bias | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Float[Array, "B H G N"]:
    """Log-sum-exp of each query's scores over the keys it attends to: a softmax's normaliser.

    A score is ``cap(scale q . k) + bias``, with ``cap(x) = soft_cap * tanh(x / soft_cap)``.

    Query i of a row attends to keys ``j <= offset + i`` and every valid kept row.

    Args:
      q: after rotary embedding, grouped by KV head. k: likewise; finite everywhere, also where no query attends.
      offset: int32, the index of each row's query 0 among the keys; traced, so that another offset compiles nothing.
        Negative where a row is shorter than N: queries at negative positions attend to no key.
      scale: multiplies q . k; may differ by row.
      kept: keys and values of earlier tokens, which all queries attend to; they have a block size of their own.
      bias: bias of scores by key positions (ALiBi), for group-major queries. Only "xla" takes one.
      window: attend only to the last ``window`` tokens, the query's own included; kept tokens are then those of the
        tokens right before the first key, in order.
      soft_cap: bound of the scores.
      block: keys the XLA form reads at once; divides T.
      implementation: the only one to try; by default the platform's in order, "xla" last.
      options: options of the implementation that is named: ``config`` (block sizes), ``interpret``.

    Returns:
      float32; ``NEG`` for a query that attends to nothing.

    Raises:
      ValueError: an argument of another shape or type, or some that contradict each other.
      NotImplementedError: the implementation that was named cannot do this.
    """
    problem = _problem(q, k, offset, scale, kept, bias, window, soft_cap, block)
    return LOG_SUM_EXP.run(implementation, problem, **options)


def attention_mass(
    q: Float[Array, "B H G N D"],
    k: Float[Array, "B H T D"],
    lse: Float[Array, "B H G N"],
    *,
    offset: Int[Array, ""] | Int[Array, " B"] | int,
    scale: float | Float[Array, " B"],
    weight: Float[Array, "B N"] | None = None,
    onto: Masses | None = None,
    kept: KeptTokens | None = None,
    bias: Bias | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    implementation: str | None = None,
    **options: Any,
) -> Masses:
    """Attention of these queries summed by key, ``sum_i weight_i exp(score_ij - lse_i)``.

    Over the last W queries of a row it is an observation window's mass (SnapKV, Li et al., arXiv 2404.14469,
    equation 1); over all of them the column sums of attention (H2O, Zhang et al., arXiv 2306.14048), which are
    additive over chunks of queries: pass the sums of earlier chunks as ``onto``.

    Args:
      lse: log-sum-exp of each query's scores, from :func:`log_sum_exp` or the attention itself.
      weight: factor of each query, at least 0; 0 for those that do not count, all 1 if None.
      onto: masses that these are added to; its buffers can be reused.
      The others as in :func:`log_sum_exp`.

    Raises:
      ValueError: an argument of another shape or type, or some that contradict each other.
      NotImplementedError: the implementation that was named cannot do this.
    """
    problem = _problem(q, k, offset, scale, kept, bias, window, soft_cap, block)
    batch, heads, group, count, _ = q.shape
    argument_checks.array("lse", lse, (batch, heads, group, count), argument_checks.FLOAT)
    argument_checks.arrays(argument_checks.FLOAT, weight=(weight, (batch, count)))
    if onto is not None:
        if (onto.kept is None) != (kept is None):
            raise ValueError("kept tokens and the masses they are added to are given together.")
        slots = 0 if kept is None else kept.k.shape[2]
        shapes = {"onto.new": (onto.new, (*q.shape[:3], k.shape[2])), "onto.kept": (onto.kept, (*q.shape[:3], slots))}
        argument_checks.arrays(argument_checks.FLOAT, **shapes)
        onto = jax.tree.map(lambda x: x.astype(jnp.float32), onto)
    lse, weight = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (lse, weight))
    counting = Counting(lse, weight, onto)
    return ATTENTION_MASS.run(implementation, problem, counting, **options)


def _problem(
    q: Any, k: Any, offset: Any, scale: Any, kept: Any, bias: Any, window: Any, soft_cap: Any, block: int | None
) -> Problem:
    argument_checks.array("q", q, (None,) * 5, argument_checks.FLOAT)
    batch, heads, _, _, dim = q.shape
    argument_checks.array("k", k, (batch, heads, None, dim), argument_checks.FLOAT)
    tokens = k.shape[2]
    argument_checks.sizes(q, tokens)
    argument_checks.per_row("offset", offset, batch, argument_checks.INTEGER)
    argument_checks.per_row("scale", scale, batch, argument_checks.FLOAT)
    argument_checks.kept_tokens(kept, batch, heads, dim)
    block = argument_checks.block(block, tokens, BLOCK)
    offset, scale = per_row(offset, batch, jnp.int32), per_row(scale, batch, jnp.float32)
    argument_checks.bounds(window, soft_cap)
    return Problem(q, k, offset, scale, kept, bias, block, window, argument_checks.plain(soft_cap))
