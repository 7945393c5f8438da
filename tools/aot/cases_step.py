"""A whole decode step of a Llama-3-8B-shaped model of four layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.array_bytes import nbytes
from kvjax.bench.shapes import shapes
from kvjax.cache.buckets import prompt_bucket
from kvjax.cache.layout import Layout, layout_on
from kvjax.cache.quantisation import Storage
from kvjax.model.config import ModelConfig
from kvjax.model.decoder import Decoder, abstract_decoder
from kvjax.model.tiling import weight_layout
from kvjax.policies import parse
from kvjax.policies.empty_cache import empty_cache
from kvjax.runtime.decode import Controls, DecodeState, decode_chunk
from kvjax.runtime.share_context import share_types
from kvjax.runtime.synthetic import benchmark_controls, decode_state
from kvjax.sharding.compile import OneDevice, put_pools, take_pools
from tools.aot.cases import Case

BATCH, PROMPT, NEW = 8, 32768, 256
MODEL = dataclasses.replace(shapes()["llama-3.1-8b"], num_layers=4)
#: The same with numbers of 4 bits in groups of 128, but for the embedding and the head.
INT4 = dataclasses.replace(MODEL, weights="int4")
#: The same as float8_e4m3fn.
FP8 = dataclasses.replace(MODEL, weights="fp8")
#: Kernels of products with weights.
PRODUCTS = "quantised_matmul", "quantised_matmul_triton"
#: The plain kernel, and the one that hands back per-slot scores, to every policy that reads them.
POLICIES = ("full", "h2o:ratio=0.5", "tova:ratio=0.5", "ahakv:ratio=0.5")


def _chunk(params: Decoder, pools: list[Any], state: DecodeState, controls: Controls, steps: jax.Array) -> Any:
    device = OneDevice(params.config, state.cache.policy)
    return decode_chunk(device, params, put_pools(pools, state), controls, steps)


def _case(policy: str, platform: str, storage: Storage, model: ModelConfig = MODEL) -> Case:
    def state() -> DecodeState:
        return decode_state(MODEL, empty_cache(MODEL, parse(policy), BATCH, PROMPT, NEW, jnp.bfloat16, storage))

    pools, rest = take_pools(jax.eval_shape(state))
    controls = jax.eval_shape(lambda: benchmark_controls(MODEL, BATCH))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    return Case(
        name=f"4 layers of Llama 3 8B, batch {BATCH}, {PROMPT:,} tokens, {policy}, {storage.kind}"
        + (f", {model.weights} weights" if model.weights else ""),
        operation="decode step",
        function=_chunk,
        arguments=(
            abstract_decoder(model, jnp.bfloat16),
            pools,
            rest,
            controls,
            steps,
        ),
        cache_bytes=nbytes(pools),
        platforms=(platform,),
        # Of XLA's own kernels none is this package's to mend; on sm_100 one of them spills two registers.
        kernels=("ragged_decode", "ragged_decode_triton", "ragged_decode_mosaic_gpu", *PRODUCTS),
        donated=(1,),
        layouts={0: lambda target, leaf: weight_layout(target, leaf.dtype, leaf.ndim)},
        # Of policies that read scores: arrays of a number a slot, 4.2 MB each a layer (logits; positions and scores,
        # which are not donated and copied where a chunk's loop begins). XLA leaves in HBM what vector memory does not
        # hold, and a v5p and a TPU7x have half a v5e's: 1.2 to 1.4 % of the pages, whatever the kernel's own buffers
        # (as much with half of a TPU7x's, and with one block an iteration).
        temp_limits={"v5p": 0.015, "tpu7x": 0.015} if policy.startswith(("h2o", "ahakv")) else {},
    )


def _quantised_case(platform: str, storage: Storage, model: ModelConfig) -> Case:
    """Weights of which no matrix may be 16-bit floats: the smallest would take 0.8 % of the cache's bytes."""
    return dataclasses.replace(_case("full", platform, storage, model), temp_limit=0.005)


def _shared_case(platform: str, storage: Storage) -> Case:
    """Rows that ask about one context, each with its own 256 tokens and room for as many."""
    policy = parse("full")
    device = OneDevice(MODEL, policy)

    def state() -> DecodeState:
        rooms = jnp.bfloat16, storage
        own = device.empty(BATCH, prompt_bucket(PROMPT + NEW), NEW, *rooms, own_capacity=NEW)
        context = share_types(device.empty(1, PROMPT, 0, *rooms), policy, MODEL)[1]
        return decode_state(MODEL, own.replace(context=context))

    pools, rest = take_pools(jax.eval_shape(state))
    found = _case("full", platform, storage)
    return dataclasses.replace(
        found,
        name=f"4 layers of Llama 3 8B, batch {BATCH} over {PROMPT:,} shared tokens, full, {storage.kind}",
        arguments=(found.arguments[0], pools, rest, *found.arguments[3:]),
        cache_bytes=nbytes((pools, rest.cache.context)),
        # Arrays of logits, 4 MB each: of a cache that is an eighth of the others', more than a hundredth. A v5p has
        # half of a v5e's vector memory, and leaves more of them in HBM: 19.2 MB where that has 12.6.
        temp_limit=0.03,
        temp_limits={"v5p": 0.035},
    )


def cases() -> list[Case]:
    """The step under each policy, on the pages that each platform reads."""
    found = []
    for platform in ("tpu", "gpu"):
        layout: Layout = layout_on(platform, MODEL.head_dim)
        found += [_case(policy, platform, Storage(layout=layout)) for policy in POLICIES]
        found += [_quantised_case(platform, Storage(layout=layout), model) for model in (INT4, FP8)]
        found.append(_shared_case(platform, Storage(layout=layout)))
    return found
