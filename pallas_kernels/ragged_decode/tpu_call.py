"""The TPU kernel's call: its operands, results and buffers, and what of them fits a core's memories."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.pages import Columns
from pallas_kernels.ragged_decode.decode_problem import Problem
from pallas_kernels.ragged_decode.tpu_kernel import kernel
from pallas_kernels.ragged_decode.tpu_refs import LANES, LOGITS_BUFFERS, Static
from pallas_kernels.ragged_decode.worklist import WorkList
from pallas_kernels.softmax import NEG
from pallas_kernels.tpu.bfloat16_parts import stacked_parts

#: Scalar memory is 1 MiB, and 900 KiB of prefetched scalars compile (libtpu 0.0.42, v5e).
SCALAR_BYTES = 900 * 1024
#: VMEM for queries, results and rings, of 62 MiB (v5p, tpu7x) or 126 MiB (v5e, v6e).
VECTOR_BYTES = 48 * 1024 * 1024

#: Arrays by the name that the kernel has for them, with where they are.
Operands = dict[str, tuple[Array, pl.BlockSpec]]
#: The same of results, of which there are types.
Results = dict[str, tuple[Any, pl.BlockSpec]]


def call(
    p: Problem, s: Static, items: WorkList, streams: dict[str, Array], interpret: Any
) -> tuple[Array, Array, Array | None]:
    """Results of every core, [C, S, G, E] and [C, S, 128], and scores by page.

    Raises:
      NotImplementedError: the work list or the buffers exceed a core's memories.
    """
    batch, _, group, _ = p.q.shape
    assert not isinstance(p.pages, Columns)
    kv = p.pages.kv.reshape(-1, *p.pages.kv.shape[2:])
    lanes = kv.shape[-1]
    scalars = _scalars(p, items, streams)
    inputs = _inputs(p, s, kv, streams, interpret)
    outputs = _outputs(p, s, lanes)
    scratch = _scratch(s, kv, streams)
    aliases = {}
    if p.with_logits:
        # Slots that no block covers are masked: they keep the buffer's initial NEG.
        aliases = {len(scalars) + len(inputs): len(outputs)}
        _add_logits(p, s, inputs, outputs, scratch, interpret)
    _check_vector_memory(inputs, outputs, scratch)

    slots = batch * s.row_pages * s.page_size
    results = pl.pallas_call(
        functools.partial(kernel, names=(*scalars, *inputs, *outputs, *scratch), static=s),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(s.cores,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            # Every index comes from the work list; checks would be 30 of 330 cycles per block on v6e.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * slots * group * lanes,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in inputs.values()),
            transcendentals=slots * group,
        ),
        interpret=interpret,
        name="ragged_decode",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    out, lse, *logits = results
    return out, lse, logits[0] if logits else None


def _scalars(p: Problem, items: WorkList, streams: dict[str, Array]) -> dict[str, Array]:
    """The work list and what else is in scalar memory."""
    scalars = {
        "count": items.count,
        "segment": items.segment,
        "page": items.page,
        "low": items.low,
        "high": items.high,
        "flags": items.flags,
    }
    if p.first_row is not None:
        scalars["first_row"] = p.first_row.reshape(1).astype(jnp.int32)
    if p.log_mass is not None:
        scalars["log_mass"] = p.log_mass.reshape(-1).astype(jnp.float32)
    if "position" in streams:
        assert p.query_position is not None
        scalars["query_position"] = p.query_position.astype(jnp.int32)
    scalar_bytes = sum(4 * x.size for x in scalars.values())
    if scalar_bytes > SCALAR_BYTES:
        raise NotImplementedError(
            f"The work list is {scalar_bytes} bytes, and scalar memory holds {SCALAR_BYTES}; use larger blocks."
        )
    return scalars


def _inputs(p: Problem, s: Static, kv: Array, streams: dict[str, Array], interpret: Any) -> Operands:
    """Queries and slopes in vector memory, pages and streams in the device's."""
    heads, group = p.q.shape[1:3]
    whole, device = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pl.ANY)
    inputs: Operands = {"q": (_queries(p, s), whole)}
    if p.slopes is not None:
        slopes = jnp.asarray(p.slopes, jnp.float32)[:, :, None]
        inputs["slopes"] = (_in_strips(jnp.broadcast_to(slopes, (heads, group, LANES)), s), whole)

    # Constrained to HBM: XLA may otherwise place a small array in VMEM, and copy it there in loops. Outside of jit it
    # is in HBM, and JAX 0.10 does not accept the constraint.
    def in_device(x: Array) -> Array:
        if interpret or not isinstance(x, Tracer):
            return x
        return pltpu.with_memory_space_constraint(x, memory_space=pltpu.HBM)

    inputs |= {name: (in_device(x), device) for name, x in streams.items()}
    inputs["kv"] = (in_device(kv), device)
    return inputs


def _outputs(p: Problem, s: Static, lanes: int) -> Results:
    """Each core's attention and its log-sum-exps."""
    batch, heads, group, _ = p.q.shape
    written = (batch * heads * s.strips, group if s.strips == 1 else s.queries, lanes)
    # A core's results are 0 for the other core's heads; both have results for the head that is split between them.
    return {
        "out": (jax.ShapeDtypeStruct((s.cores, *written), p.q.dtype), _by_core(*written)),
        "lse": (jax.ShapeDtypeStruct((s.cores, written[0], LANES), jnp.float32), _by_core(written[0], LANES)),
    }


def _scratch(s: Static, kv: Array, streams: dict[str, Array]) -> dict[str, Any]:
    """The rings of blocks, and what of the softmax's state waits in vector memory."""
    scratch: dict[str, Any] = {
        "kv_ring": pltpu.VMEM((s.buffers, s.pages, *kv.shape[1:]), kv.dtype),
        "arrived": pltpu.SemaphoreType.DMA((3, s.buffers)),
        "zeros": pltpu.VMEM((s.queries, LANES), jnp.float32),
    }
    if s.in_memory:
        scratch["softmax"] = pltpu.VMEM((2 * s.strips, 2, s.queries, LANES), jnp.float32)
        scratch["sums"] = pltpu.VMEM((2 * s.strips, 4, s.queries, kv.shape[-1]), jnp.float32)
    if s.waiting:
        scratch["scores"] = pltpu.VMEM((s.together, s.queries, s.rows), jnp.float32)
        scratch["weights"] = pltpu.VMEM((s.together, s.queries, s.rows), jnp.bfloat16)
    return scratch | {
        f"{name}_ring": pltpu.VMEM((s.buffers, s.pages, s.page_size), x.dtype) for name, x in streams.items()
    }


def _add_logits(
    p: Problem, s: Static, inputs: Operands, outputs: Results, scratch: dict[str, Any], interpret: Any
) -> None:
    """Add the returned scores, by page: the array they are written into, and the buffers that they leave from."""
    batch, _, group, _ = p.q.shape
    by_page = jax.ShapeDtypeStruct((batch * s.row_pages, group, s.page_size), jnp.float32)
    device = pl.BlockSpec(memory_space=pl.ANY)
    inputs[""] = (jnp.full(by_page.shape, NEG, by_page.dtype), device)
    outputs["logits"] = (by_page if interpret else pltpu.HBM(by_page.shape, by_page.dtype), device)
    sent = LOGITS_BUFFERS * s.together
    scratch["logits_ring"] = pltpu.VMEM((sent, s.pages, group, s.page_size), jnp.float32)
    scratch["left"] = pltpu.SemaphoreType.DMA((sent,))


def _queries(p: Problem, s: Static) -> Float[Array, "S G E"]:
    batch, heads, group, dim = p.q.shape
    q = p.q.astype(jnp.float32)
    if p.k_scale is not None:
        q = q * p.k_scale[:, :, None]
    assert not isinstance(p.pages, Columns)
    q = q if s.tile else q.astype(jnp.bfloat16)
    q = jnp.pad(q.reshape(batch * heads, group, dim), ((0, 0), (0, 0), (0, p.pages.kv.shape[-1] - dim)))
    q = _in_strips(q, s)
    return stacked_parts(q) if s.tile else q


def _in_strips(x: Array, s: Static) -> Array:
    """Reshape [N, G, E] to [N strips, queries, E]."""
    x = jnp.pad(x, ((0, 0), (0, s.queries * s.strips - x.shape[1]), (0, 0)))
    return x.reshape(-1, s.queries, x.shape[2])


def _by_core(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda core, *_: (core, *(0 for _ in shape)))


def _check_vector_memory(inputs: Any, outputs: Any, scratch: Any) -> None:
    """Raise ``NotImplementedError`` where buffers exceed VMEM; arrays are padded to tiles, results double-buffered."""

    def nbytes(shape: tuple[int, ...], dtype: Any) -> int:
        *major, rows, lanes = shape
        return int(np.prod(major)) * max(rows, 8) * max(lanes, LANES) * jnp.dtype(dtype).itemsize

    held = sum(nbytes(x.shape, x.dtype) for name, (x, _) in inputs.items() if name in ("q", "slopes"))
    held += sum(2 * nbytes(x.shape[1:], x.dtype) for name, (x, _) in outputs.items() if name in ("out", "lse"))
    held += sum(nbytes(x.shape, x.dtype) for name, x in scratch.items() if name.endswith("ring"))
    if held > VECTOR_BYTES:
        raise NotImplementedError(f"Queries, results and buffers are {held} bytes; vector memory holds {VECTOR_BYTES}.")
