"""The engine's memory: rows are inserted in place, and what was planned is what is there."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.native import needs_native

from kvjax.cache.cache import detach
from kvjax.cache.host_memory import live_device_bytes
from kvjax.cache.quantisation import Storage, parse_storage
from kvjax.engine.core import EngineCore
from kvjax.options import GenerationOptions
from kvjax.policies import parse
from kvjax.policies.empty_cache import empty_cache
from kvjax.request import Request
from kvjax.runtime.insert import Admitted
from kvjax.runtime.programs import EMPTY_STATE, INSERT
from kvjax.runtime.synthetic import benchmark_controls
from kvjax.sharding.compile import OneDevice

#: Slots of the batch, and rows that come at once.
SLOTS, COMING, TOKENS = 16, 2, 2048


@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("text", ["full", "lagkv:ratio=0.5,lag=16", "h2o:ratio=0.5", "razor:ratio=0.5,heads=0.1"])
def test_rows_are_inserted_in_place_and_no_other_row_is_copied(text, storage):
    """XLA's own account: the pools of all slots are aliased, and what it needs beside is less than one row's."""
    config, policy = toys.tiny_config(max_position=1 << 16), parse(text)
    device, kind = OneDevice(config, policy), parse_storage(storage)
    sizes = {"prompt_capacity": TOKENS, "new_capacity": 64, "dtype": jnp.dtype("float32"), "storage": kind}
    ids = lambda rows, dtype: jax.ShapeDtypeStruct((rows,), dtype)  # noqa: E731
    state = jax.eval_shape(
        lambda present: EMPTY_STATE.function(device, present, **sizes),
        jax.ShapeDtypeStruct((SLOTS, config.vocab_size), jnp.bool_),
    )
    cache = jax.eval_shape(lambda: empty_cache(config, policy, COMING, TOKENS, 64, jnp.dtype("float32"), storage=kind))
    logits = jax.ShapeDtypeStruct((COMING, config.vocab_size), jnp.float32)
    present = jax.ShapeDtypeStruct((COMING, config.vocab_size), jnp.bool_)
    admitted = Admitted(logits, present, ids(COMING, jnp.int32), ids(COMING, jnp.int32))
    controls = jax.eval_shape(lambda: benchmark_controls(config, COMING))
    account = INSERT.lower(device, state, cache, admitted, controls).compile().memory_analysis()
    bytes_of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    pools, row = bytes_of(detach(state.cache)[0]), bytes_of(detach(cache)[0]) // COMING
    assert account.alias_size_in_bytes >= pools
    assert account.temp_size_in_bytes < row / 2, (account.temp_size_in_bytes, row)


@needs_native
def test_slots_begin_small_only_where_a_step_reads_all_that_is_allocated(monkeypatch):
    def sizes(**changes):
        lm = toys.tiny_model(max_position=1024, **changes)
        core = EngineCore(lm, "full", None, slots=2, prompt_tokens=512, new_tokens=512)
        core.close()
        return len(core.slots.levels)

    assert sizes(head_dim=32) == 1 and sizes(head_dim=24) == 3  # channels that the C++ does not take
    monkeypatch.setenv("KVJAX_NATIVE", "0")
    assert sizes(head_dim=32) == 3


@pytest.mark.parametrize("storage", [None, "int8"])
def test_what_was_planned_is_what_is_there(storage):
    """Every array of an engine at work, weights apart: its slots, at their largest, to the byte."""
    lm = toys.tiny_model(max_position=1024)
    gc.collect()
    before = live_device_bytes()
    core = EngineCore(lm, "full", storage, slots=4, prompt_tokens=512, new_tokens=64)
    try:
        core.slots.move(len(core.slots.levels) - 1)
        cache = core.slots._state.cache
        assert cache.nbytes == core.sizes.slots_bytes
        options = GenerationOptions(policy="full", storage=storage or Storage(), max_new_tokens=40, chat=False)
        for length in (500, 300, 20, 7, 480, 3):
            ids = np.random.default_rng(length).integers(0, 256, length).tolist()
            core.add(core.slots.row_of(Request(lm, ids, options, exact=True), limit=40))
        most = 0
        while not core.loop.idle:
            core.loop.iterate()
            most = max(most, live_device_bytes() - before)
        planned = core.sizes.slots_bytes + core.sizes.prefill_cache_bytes + core.sizes.working_bytes
        assert core.sizes.slots_bytes < max(most, core.slots.peak_bytes - before) <= planned
    finally:
        core.close()
    left = live_device_bytes() - before
    assert left <= most - core.sizes.slots_bytes / 2, "keys and values are given back at once"
    del core, cache
    gc.collect()
    assert live_device_bytes() == before
