"""CPU form: ``pallas_kernels/cpu/attention.cc``, which reads only the pages within a head's length, each once.

The XLA form reads all pages that a head owns, and what it makes of them between its loops.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import argument_checks
from pallas_kernels.cpu import library
from pallas_kernels.cpu.arguments import or_empty
from pallas_kernels.pages import Columns, Pages
from pallas_kernels.ragged_decode.decode_problem import Decoded, Problem

(_FUNCTION,) = library.FUNCTIONS["attention"]
#: Of pages.
DTYPES = ("float32", "bfloat16", "int8")
#: Slots of a page, and channels of values, come in multiples of so many.
LANES = 16


def follows_lengths(pages: Pages) -> bool:
    """Whether such pages, or ones of their type and shape, are read by this form, which is compiled here if need be."""
    _, _, page_size, dim = pages.shape
    fits = isinstance(pages, Columns) and pages.dtype.name in DTYPES and not (page_size % LANES or dim % LANES)
    return fits and library.loaded("attention") is not None


def decode(p: Problem, *, config: None = None, suffix: str = "") -> Decoded:
    """See :func:`pallas_kernels.ragged_decode.ragged_decode`; ``suffix``: of the functions' names, as registered."""
    del config
    _, total, page_size, dim = p.pages.shape
    if not isinstance(p.pages, Columns) or p.pages.dtype.name not in DTYPES:
        raise NotImplementedError(f"The CPU form reads columns of {', '.join(DTYPES)}.")
    if page_size % LANES or dim % LANES or not p.q.size:
        raise NotImplementedError(f"The CPU form takes slots and channels in multiples of {LANES}, and a row at least.")
    argument_checks.compiled_in(p.soft_cap, p.logits_scale, None if p.logits_scale is None else p.scale)
    if not suffix and library.loaded("attention") is None:
        raise NotImplementedError("There is no compiled attention for this CPU.")
    rows, heads, group, _ = p.q.shape
    q = p.q.astype(jnp.float32) * jnp.float32(p.scale)
    if p.k_scale is not None:
        q = q * p.k_scale[:, :, None]
    first = jnp.broadcast_to(jnp.asarray(p.first_page, jnp.int32), (rows, heads))
    placed = p.position is not None and p.query_position is not None
    call = jax.ffi.ffi_call(
        _FUNCTION + suffix,
        (
            jax.ShapeDtypeStruct((rows, heads, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads, group), jnp.float32),
            jax.ShapeDtypeStruct((rows, total, group, page_size) if p.with_logits else (0,), jnp.float32),
        ),
        vmap_method="sequential",
    )
    out, lse, logits = call(
        q,
        p.pages.k,
        p.pages.v,
        first,
        p.length.astype(jnp.int32),
        jnp.asarray(0 if p.first_row is None else p.first_row, jnp.int32),
        or_empty(p.v_scale, jnp.float32),
        or_empty(p.log_mass, jnp.float32),
        or_empty(p.position if placed else None, jnp.int32),
        or_empty(p.query_position if placed else None, jnp.int32),
        or_empty(p.slopes, jnp.float32),
        window=np.int64(p.window or 0),
        soft_cap=np.float32(p.soft_cap or 0),
        ratio=np.float32(1 if p.logits_scale is None else p.logits_scale / p.scale),
    )
    return Decoded(out.astype(p.q.dtype), lse, logits if p.with_logits else None)
