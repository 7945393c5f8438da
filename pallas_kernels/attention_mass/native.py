"""CPU form: log-sum-exps by ``pallas_kernels/cpu/prefill.cc``, without values; masses by ``attention_mass.cc``.

Scores stay in the first cache; the XLA form writes a block's to memory, several times.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.mass_problem import Counting, Masses, Problem
from pallas_kernels.cpu import library
from pallas_kernels.prefill.native import dtype_of

_PREFILL, _MASS = library.FUNCTIONS["prefill"][0], library.FUNCTIONS["attention_mass"][0]


def log_sum_exp(p: Problem, *, config: None = None, suffix: str = "") -> Float[Array, "B H G N"]:
    """See :func:`pallas_kernels.attention_mass.log_sum_exp`; ``suffix``: of the functions' names, as registered."""
    del config
    q, k, kept_k, kept_length, log_mass = _given("prefill", p, suffix)
    results = _like(*q.shape[:4], 0), _like(*q.shape[:4])
    call = jax.ffi.ffi_call(_PREFILL + suffix, results, vmap_method="sequential")
    every = jnp.zeros((0,), jnp.int32)
    kept = kept_k, kept_k[..., :0], kept_length, log_mass
    _, lse = call(q, k, k[..., :0], p.offset, every, *kept, scale=np.float32(1), **_bounds(p))
    return lse


def attention_mass(p: Problem, c: Counting, *, config: None = None, suffix: str = "") -> Masses:
    """See :func:`pallas_kernels.attention_mass.attention_mass`; ``suffix``: of the function's name, as registered."""
    del config
    q, k, kept_k, kept_length, log_mass = _given("attention_mass", p, suffix)
    onto = c.onto or Masses(jnp.zeros((*q.shape[:3], k.shape[2]), jnp.float32), None)
    before = jnp.zeros((*q.shape[:3], kept_k.shape[2]), jnp.float32) if onto.kept is None else onto.kept
    call = jax.ffi.ffi_call(
        _MASS + suffix,
        (_like(*onto.new.shape), _like(*before.shape)),
        input_output_aliases={8: 0, 9: 1},
        vmap_method="sequential",
    )
    weight = jnp.ones((q.shape[0], q.shape[3]), jnp.float32) if c.weight is None else c.weight
    new, kept = call(q, k, c.lse, weight, p.offset, kept_k, kept_length, log_mass, onto.new, before, **_bounds(p))
    return Masses(new, None if p.kept is None else kept)


def _given(name: str, p: Problem, suffix: str) -> tuple[Array, Array, Array, Array, Array]:
    """Scaled queries, keys, and of kept tokens keys, lengths and log masses, as both functions take them.

    ``name``: of the library; it raises what :func:`~pallas_kernels.prefill.native.dtype_of` does.
    """
    kept, dtype = p.kept, dtype_of(name, p, suffix)
    batch, heads, _, _, dim = p.q.shape
    q = p.q.astype(jnp.float32) * p.scale[:, None, None, None, None]
    k, log_mass = p.k.astype(dtype), jnp.zeros((0,), jnp.float32)
    if kept is None:
        return q, k, jnp.zeros((batch, heads, 0, dim), dtype), jnp.zeros((batch, heads), jnp.int32), log_mass
    log_mass = log_mass if kept.log_mass is None else kept.log_mass.astype(jnp.float32)
    return q, k, kept.k.astype(dtype), kept.length.astype(jnp.int32), log_mass


def _bounds(p: Problem) -> dict[str, np.generic]:
    return {"window": np.int64(p.window or 0), "soft_cap": np.float32(p.soft_cap or 0)}


def _like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
