"""Estimates the memory that prefill needs beside weights and cache from shapes, for a plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.buckets import block_of, keys_of, prompt_bucket, request_bucket, rows_together
from kvjax.model.config import ModelConfig
from kvjax.policies.base import Policy
from kvjax.policies.composed import HeadWise
from kvjax.policies.lagkv import LagKV
from pallas_kernels import dispatch

#: Whether a layer that is kept whole is packed beside its dense keys and values: XLA's compiler for TPUs does it in
#: their place up to JAX 0.10 (libtpu 0.0.42), and beside them from 0.11 on (0.0.48 and 0.0.50).
_PACKS_BESIDE = jax.__version_info__ >= (0, 11)
#: Copies of a layer's dense keys and values that dividing them among groups of heads, and packing each, makes on a TPU:
#: compiled for a v5e with RazorAttention, 8 rows of 32,768 tokens, 8 heads of 128 channels.
_GROUPED = 1.8
#: And copies that LagKV's statistics of every token make there; others select in less than reading takes.
_STATISTICS = 1.5
#: Bytes of each score that all layers choose by together.
_CHOOSING = 16
#: Keys and values that a layer holds while its prompt is repeated, copies included, in units of its own.
_REPEATED = 1.8


def prefill_peak_bytes(
    config: ModelConfig, policy: Policy, batch: int, prompt: int, dtype: Any, inner: int, *, by_layers: bool = False
) -> int:
    """Temporary bytes of prefill: what is alive while a block is read or a layer is packed.

    Hidden states and rotary tables of the whole prompt and one layer's dense keys and values, then the larger of: the
    intermediates of one query block, and the two copies of keys and values that a selection makes. Keeping everything
    packs straight into the cache and needs none of those; layers with a window need the first. Against XLA's own figure
    on the CPU (the default model's channels, 256 to 4,096 tokens) it is between 10 % under and 1.7 times as much for
    one row, up to twice for eight: what C++ kernels take is no array of XLA's.

    A prompt that is repeated (KVzip) is held whole by every layer meanwhile, or by one after the other, beside what the
    next one reads in every pass; one of whose tokens all layers choose together is held by all.

    A TPU's compiler fuses more of a block, leaves no score in memory, and pads the tables to whole lanes; what it packs
    is alive beside the dense keys and values. ``docs/sharding.md`` has its figures for every policy beside these.

    Args:
      config: the model, or what one device of a mesh has of its heads.
      policy: which tokens stay. batch: rows. prompt: tokens of the longest.
      dtype: of weights and cache.
      inner: channels of the MLP that are there.
      by_layers: whether a prompt that is repeated is read layer by layer.
    """
    item = jnp.dtype(dtype).itemsize
    chunks, chosen = policy.chunks(config), policy.chosen
    tokens = prompt_bucket(max(chunks)) if chunks else request_bucket(prompt)
    block, rows = block_of(tokens), batch * tokens
    together = rows_together(batch, block)
    hidden = rows * config.hidden_size * item
    both = 2 * rows * config.num_kv_heads * config.head_dim * item
    # Rows that go through a layer in turns are cut out and put back, and none is packed as it is read.
    turns = 0 if together == batch else together * (hidden + both) // batch
    tables = _rotary_tables(config)
    # What keeps everything packs as much as it has read: its dense keys and values are counted as the layer's cache. A
    # ring of a window is packed out of them, as what a policy selects is.
    selects = type(chosen).compress is not Policy.compress or type(chosen).select is not Policy.select
    apart = selects or config.sliding
    dense = both if apart else 0
    turns += both if turns and not apart else 0
    repeat = policy.signals.repeat
    held = 0  # a prompt that is repeated is held whole by all layers, or by one, with what each of its keys gets
    if repeat is not None:
        alone = by_layers and not policy.shares_layers
        layers = 1 if alone else config.num_layers
        # Measured on the CPU: rows that are not cut out are copied for the passes.
        copies = (layers - 1) if turns else _REPEATED * layers
        held = int(copies * both) + layers * rows * config.num_heads * 4
        if by_layers:
            size = min(repeat.chunk, tokens)
            width = prompt_bucket(size + max(repeat.request_tokens))
            # The inputs of all passes, one pass, and a block of its scores and of what they become.
            held += (-(-tokens // size) + 1) * batch * width * config.hidden_size * item
            queries = rows_together(batch, block_of(width)) * block_of(width) * config.num_heads
            held += 2 * queries * keys_of(width) * 4
    elif policy.shares_layers:
        held = (config.num_layers - 1) * both
    if policy.shares_layers:  # scores, and what sorting them takes
        held += config.num_layers * rows * config.num_kv_heads * _CHOOSING
    if dispatch.platform() == "tpu":
        dense = held + (both if apart or _PACKS_BESIDE else 0)
        rotary = tables * 2 * rows * max(config.rotary_channels // 2, 128) * 4
        reading = 2 * config.hidden_size + max(2 * inner, 3 * config.num_heads * config.head_dim)
        copies = _GROUPED if isinstance(chosen, HeadWise) else _STATISTICS if isinstance(chosen, LagKV) else 0
        needed = hidden + rotary + dense + turns + max(together * block * reading * item, int(copies * both))
        # A head that shares its layer's slots may keep every token: those kept are gathered beside as many dense rows.
        gathers = policy.shares_slots and not policy.shares_layers
        return max(needed, hidden + 2 * both) if gathers else needed
    rotary = tables * 2 * rows * (config.rotary_channels // 2) * 4
    attention = config.num_heads * (2 * keys_of(tokens) + 3 * config.head_dim) * 4
    mlp = 3 * inner * item
    shared = 2 * config.hidden_size * 4 + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * 4
    reading = together * block * (max(attention, mlp) + shared)
    logits = batch * config.vocab_size * 4
    return hidden + rotary + held + dense + turns + max(reading, 2 * both if selects else 0) + logits


def _rotary_tables(config: ModelConfig) -> int:
    """The number of different rotary tables that a model's layers have."""
    layers = map(config.layer, range(config.num_layers))
    return len({(layer.rope, layer.rotary_channels) for layer in layers if layer.positional == "rope"})
