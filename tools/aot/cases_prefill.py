"""``prefill``: chunks over head sizes, groups and dtypes, and one layer's chunks in a loop with their signals."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import Masses, attention_mass, log_sum_exp
from pallas_kernels.prefill import prefill
from tools.aot.cases import Case
from tools.aot.cases_mass import IMPLEMENTATIONS, SPILLS
from tools.aot.chunk_shape import ChunkShape


def _chunk(q: Any, k: Any, v: Any, offset: Any, length: Any, **options: Any) -> Any:
    return prefill(q, k, v, offset=offset, length=length, scale=q.shape[-1] ** -0.5, **options)


def _layer(q: Any, k: Any, v: Any, count: Any, *, implementation: str, queries: int) -> Any:
    """All chunks of a prompt in one layer: each writes its keys, attends, and adds to the column sums."""
    batch, heads, group, tokens, dim = q.shape
    scale = dim**-0.5

    def chunk(x: Any, i: Any, axis: int) -> Any:
        return jax.lax.dynamic_slice_in_dim(x, i * queries, queries, axis=axis)

    def body(i: Any, carry: Any) -> Any:
        ks, vs, out, total = carry
        at = i * queries
        ks = jax.lax.dynamic_update_slice_in_dim(ks, chunk(k, i, 2), at, axis=2)
        vs = jax.lax.dynamic_update_slice_in_dim(vs, chunk(v, i, 2), at, axis=2)
        qs = chunk(q, i, 3)
        length = jnp.clip(count - at, 0, queries)
        found = prefill(qs, ks, vs, offset=at, length=length, scale=scale, implementation=implementation)
        weight = (jnp.arange(queries) < length[:, None]).astype(jnp.float32)
        onto, common = Masses(total, None), dict(offset=at, scale=scale, implementation=implementation)
        total = attention_mass(qs, ks, found.lse, weight=weight, onto=onto, **common).new
        return ks, vs, jax.lax.dynamic_update_slice_in_dim(out, found.out, at, axis=3), total

    empty = jnp.zeros((batch, heads, tokens, dim), k.dtype)
    start = (empty, empty, jnp.zeros(q.shape, q.dtype), jnp.zeros((batch, heads, group, tokens), jnp.float32))
    blocks = (jnp.max(count) + queries - 1) // queries
    ks, vs, out, columns = jax.lax.fori_loop(0, blocks, body, start)
    last, where = q[:, :, :, -32:], dict(offset=count - 32, scale=scale, implementation=implementation)
    window = attention_mass(last, ks, log_sum_exp(last, ks, **where), **where).new
    return ks, vs, out, columns, window


def cases() -> list[Case]:
    """Every case."""
    chunks = {
        "chunk of 1,024, G = 4, D = 128, bfloat16": ChunkShape(),
        "chunk of 1,024, G = 8, D = 128, bfloat16, 4 rows": ChunkShape(group=8, batch=4, keys=8192),
        "chunk of 1,024, G = 3, D = 64, bfloat16": ChunkShape(group=3, head_dim=64, heads=3),
        "chunk of 1,024, G = 1, D = 80, bfloat16": ChunkShape(group=1, head_dim=80),
        "chunk of 1,024, G = 16, D = 256, bfloat16": ChunkShape(group=16, head_dim=256, heads=4, keys=8192),
        "chunk of 1,024, G = 4, D = 256, bfloat16": ChunkShape(head_dim=256),
        "chunk of 1,024, G = 16, D = 256, bfloat16, 4,096 keys": ChunkShape(group=16, head_dim=256, heads=4, keys=4096),
        "chunk of 1,024, G = 32, D = 128, bfloat16": ChunkShape(group=32, heads=2),
        "chunk of 16, G = 16, D = 128, bfloat16": ChunkShape(16, group=16),
        "chunk of 256, G = 8, D = 128, float32": ChunkShape(256, group=8, dtype=jnp.float32, keys=8192),
        "chunk of 64, G = 4, D = 96, bfloat16": ChunkShape(64, keys=64, head_dim=96),
        "sliding over 512, chunk of 1,024, G = 4, D = 256, bfloat16": ChunkShape(heads=1, head_dim=256, window=512),
        "sliding over 4,096, chunk of 1,024, G = 4, D = 128, bfloat16": ChunkShape(window=4096),
        "sliding over 4,096, soft cap, chunk of 1,024, G = 2, D = 256, bfloat16": ChunkShape(
            group=2, head_dim=256, window=4096, soft_cap=50.0
        ),
        "soft cap, chunk of 1,024, G = 3, D = 64, bfloat16": ChunkShape(group=3, head_dim=64, heads=3, soft_cap=50.0),
        "sliding over 1,024, soft cap, chunk of 256, G = 8, D = 128, float32": ChunkShape(
            256, group=8, dtype=jnp.float32, keys=8192, window=1024, soft_cap=50.0
        ),
    }
    layers = {
        "a layer of 8,192 tokens, G = 4, D = 128": ChunkShape(keys=8192),
        "a layer of 8,192 tokens, G = 3, D = 64": ChunkShape(keys=8192, group=3, head_dim=64, heads=3),
    }
    found = []
    for platform, implementation in IMPLEMENTATIONS.items():
        for name, shape in chunks.items():
            function = functools.partial(_chunk, implementation=implementation, **shape.bounds)
            ints = jax.ShapeDtypeStruct((shape.batch,), jnp.int32)
            arguments = (shape.q(shape.queries), shape.rows(shape.keys), shape.rows(shape.keys), ints, ints)
            # Queries and outputs of a head size that is not a multiple of a TPU's lanes are padded.
            padding = 4 * shape.batch * shape.heads * shape.group * shape.queries * 128 if shape.head_dim % 128 else 0
            found.append(_case(platform, name, shape, function, arguments, padding / (2 * shape.key_bytes)))
        for name, shape in layers.items():
            function = functools.partial(_layer, implementation=implementation, queries=shape.queries)
            rows, count = shape.rows(shape.keys), jax.ShapeDtypeStruct((shape.batch,), jnp.int32)
            # Temporary memory of one chunk: four copies of its queries and outputs.
            extra = 4 * shape.group * shape.queries / shape.keys
            made = _case(platform, name, shape, function, (shape.q(shape.keys), rows, rows, count), extra)
            if platform == "tpu":  # the masses' kernels too
                made = dataclasses.replace(made, spills=SPILLS)
            if shape.head_dim < 128:
                # All queries, transposed to the kernel's layout before the loop; other chips do so in on-chip memory.
                padded = shape.group / 2 * (128 / shape.head_dim)
                made = dataclasses.replace(made, temp_limits={"v5p": made.temp_limit + padded})
            found.append(made)
    return found + [_splash(block) for block in (512, 1024)]


def _splash(block: int) -> Case:
    """JAX's own kernel on a prompt's first chunk, for comparison; its offset is static."""
    shape = ChunkShape(keys=1024)
    head = (shape.group, shape.queries, shape.head_dim)
    q = jax.ShapeDtypeStruct((shape.heads, *head), shape.dtype)
    keys = jax.ShapeDtypeStruct((shape.heads, shape.keys, shape.head_dim), shape.dtype)

    def attend(q: Any, k: Any, v: Any) -> Any:
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        mask = splash.MultiHeadMask([splash.CausalMask((shape.queries, shape.keys)) for _ in range(shape.group)])
        sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=512)
        made = splash.make_splash_mqa(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
        return jax.vmap(made)(q, k, v)

    return Case(
        f"JAX's splash attention, blocks of {block}, G = 4, D = 128",
        "prefill",
        attend,
        (q, keys, keys),
        2 * shape.key_bytes,
        ("tpu",),
        kernels=("splash_mqa_fwd_no_residuals",),
        spills=4_100,
        temp_limit=10.0,  # not this package's kernel
    )


def _case(platform: str, name: str, shape: ChunkShape, function: Any, arguments: Any, extra: float) -> Case:
    """A case whose temporary memory is at most 1 % of the keys and values plus the fraction ``extra``."""
    return Case(
        name,
        "prefill",
        function,
        arguments,
        2 * shape.key_bytes,
        (platform,),
        kernels=("prefill", "attention_mass", "log_sum_exp"),
        temp_limit=0.01 + extra,
    )
