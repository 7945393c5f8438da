"""CPU form: ``pallas_kernels/cpu/prefill.cc``, which takes the keys that queries see, a few queries at a time.

Their scores stay in the first cache; the XLA form writes a block's to memory, several times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import argument_checks
from pallas_kernels.cpu import library
from pallas_kernels.cpu.arguments import or_empty
from pallas_kernels.prefill.prefill_problem import Prefilled, Problem

(_FUNCTION,) = library.FUNCTIONS["prefill"]
#: Of keys and values.
DTYPES = ("float32", "bfloat16")
#: Channels come in multiples of so many.
LANES = 16


def prefill(p: Problem, *, config: None = None, suffix: str = "") -> Prefilled:
    """See :func:`pallas_kernels.prefill.prefill`; ``suffix``: of the functions' names, as they were registered."""
    del config
    batch, heads, _, _, dim = p.q.shape
    if p.k.dtype != p.v.dtype:
        raise NotImplementedError("The CPU form reads keys and values of one type.")
    argument_checks.compiled_in(p.scale)
    dtype = dtype_of("prefill", p, suffix)
    call = jax.ffi.ffi_call(
        _FUNCTION + suffix,
        (jax.ShapeDtypeStruct(p.q.shape, jnp.float32), jax.ShapeDtypeStruct(p.q.shape[:4], jnp.float32)),
        vmap_method="sequential",
    )
    nothing = jnp.zeros((batch, heads, 0, dim), dtype)
    kept = p.kept
    out, lse = call(
        p.q.astype(jnp.float32),
        p.k.astype(dtype),
        p.v.astype(dtype),
        jnp.broadcast_to(p.offset, (batch,)),
        or_empty(p.length, jnp.int32),
        nothing if kept is None else kept.k.astype(dtype),
        nothing if kept is None else kept.v.astype(dtype),
        or_empty(None if kept is None else kept.length, jnp.int32),
        or_empty(None if kept is None else kept.log_mass, jnp.float32),
        scale=np.float32(p.scale),
        window=np.int64(p.window or 0),
        soft_cap=np.float32(p.soft_cap or 0),
    )
    return Prefilled(out.astype(p.q.dtype), lse)


def dtype_of(name: str, p: Any, suffix: str) -> jnp.dtype:
    """The type in which a library reads a problem's keys, this operation's or attention mass's.

    Raises:
      NotImplementedError: it does not take the problem, or is not there.
    """
    dtype = p.k.dtype if p.kept is None else jnp.promote_types(p.k.dtype, p.kept.k.dtype)
    if dtype.name not in DTYPES:
        raise NotImplementedError(f"The CPU form reads keys of {' or '.join(DTYPES)}.")
    if p.q.shape[-1] % LANES or not p.q.size:
        raise NotImplementedError(f"The CPU form takes channels in multiples of {LANES}, and a query at least.")
    if p.bias is not None:
        raise NotImplementedError("ALiBi runs in XLA.")
    argument_checks.compiled_in(p.soft_cap)
    if not suffix and library.loaded(name) is None:
        raise NotImplementedError(f"There is no compiled {name.replace('_', ' ')} for this CPU.")
    return dtype
