"""The compiled programs: what they hold, what they alias, and when they are compiled."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from jax._src.core import jaxprs_in_params
from jax.extend.core import Jaxpr
from support.decode_memory import decode_memory

import kvjax
from kvjax.cache.quantisation import MODEL
from kvjax.model.config import RopeConfig
from kvjax.model.decoder import abstract_decoder, without_layers
from kvjax.policies import H2O, AdaptiveHeads, AhaKV, Full, KVzip, LagKV, RazorAttention, StreamingLLM
from kvjax.policies.empty_cache import empty_cache
from kvjax.policies.window_layers import for_model
from kvjax.runtime import synthetic
from kvjax.runtime.compilation import compile_clock
from kvjax.runtime.kvzip_passes import Passes
from kvjax.runtime.prefill_by_layers import PREFILL_LAYER_FRESH
from kvjax.runtime.prefill_peak import prefill_peak_bytes
from kvjax.runtime.programs import DECODE_CHUNK, ONE_DEVICE, PREFILL_FRESH
from kvjax.runtime.single_layer_programs import LayerInput
from kvjax.runtime.synthetic import benchmark_controls, decode_state, filled_cache
from kvjax.sharding.compile import OneDevice

POLICIES = [Full(), StreamingLLM(window=100), StreamingLLM(window=60, positions="cache"), LagKV(ratio=0.5, lag=16)]


def prefill_temporaries(policy, tokens: int, batch: int = 1) -> int:
    config = toys.tiny_config(num_layers=3, max_position=1 << 16)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    lowered = PREFILL_FRESH.lower(
        OneDevice(config, policy), abstract_decoder(config), ints(batch, tokens), ints(batch), ints(batch),
        prompt_capacity=tokens, new_capacity=32, dtype=jnp.dtype("float32"), storage=MODEL,
    )  # fmt: skip
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", [Full(), LagKV(ratio=0.25, lag=128), StreamingLLM(window=256)], ids=str)
def test_prefill_holds_one_layer_and_nothing_square(policy):
    short, long = (prefill_temporaries(policy, tokens) for tokens in (2048, 8192))
    # Four times the tokens: at most about four times the memory (16 times if anything were T x T) ...
    assert long <= 4.3 * short
    config = toys.tiny_config()
    dense = 2 * 8192 * config.num_kv_heads * config.head_dim * 4
    hidden = 8192 * config.hidden_size * 4
    # ... and of the order of one layer's keys and values and a few hidden states; T x T floats would be 268 MB.
    assert long <= 6 * dense + 4 * hidden + (4 << 20)


def test_prefill_memory_does_not_grow_with_layers():
    def temporaries(layers: int) -> int:
        config = toys.tiny_config(num_layers=layers, max_position=1 << 16)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        lowered = PREFILL_FRESH.lower(
            OneDevice(config, StreamingLLM(window=64)), abstract_decoder(config), ints(1, 4096), ints(1), ints(1),
            prompt_capacity=4096, new_capacity=32, dtype=jnp.dtype("float32"), storage=MODEL,
        )  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) <= 1.1 * temporaries(2)


COMPOSED = RazorAttention(heads=((0, 1),), inner=H2O(budget=100))
SHARED = AdaptiveHeads(budget=100, inner=H2O())


@pytest.mark.parametrize("storage", ["model", "int8"])
@pytest.mark.parametrize("policy", [*POLICIES, AhaKV(budget=100), COMPOSED, SHARED], ids=str)
def test_a_decode_step_aliases_the_cache_and_copies_none_of_it(policy, storage):
    config = toys.tiny_config(max_position=1 << 16)
    analysis, pool_bytes = decode_memory(config, policy, 2048, storage)
    assert analysis.alias_size_in_bytes >= pool_bytes
    if (
        isinstance(policy, Full) and storage == "model"
    ):  # large against the rest: a hidden copy of even one layer's pool would show
        assert analysis.temp_size_in_bytes < pool_bytes // 4


def test_the_donated_state_is_gone_and_the_cache_given_to_generate_is_not():
    lm = toys.tiny_model()
    first = kvjax.generate(lm, "one two three", max_new_tokens=4)
    cache = first.cache
    again = [kvjax.generate(lm, "and then", cache=cache, max_new_tokens=6) for _ in range(2)]
    assert again[0].tokens == again[1].tokens
    consumed = kvjax.generate(lm, "and then", cache=cache, consume_cache=True, max_new_tokens=6)
    assert consumed.tokens == again[0].tokens
    with pytest.raises(kvjax.UsageError, match="consumed"):
        kvjax.generate(lm, "and then", cache=cache, max_new_tokens=1)


def test_new_prompts_temperatures_and_lengths_do_not_compile_again():
    lm = toys.tiny_model()
    kvjax.generate(lm, "hello", policy="lagkv:ratio=0.5,lag=8", max_new_tokens=5)
    with compile_clock() as clock:
        for prompt, options in [
            ("another prompt", {}),
            ("hello", {"max_new_tokens": 30}),
            ("hello", {"temperature": 0.7, "seed": 3}),
            ("hello", {"temperature": 1.0, "top_p": 0.9, "top_k": 7, "min_p": 0.1}),
            ("hello", {"repetition_penalty": 1.3, "stop": ["xyz", "ab"], "stop_token_ids": [4]}),
            ("hello", {"max_new_tokens": 0}),
        ]:
            kvjax.generate(lm, prompt, policy="lagkv:ratio=0.5,lag=8", **options)
    assert clock.programs == 0


def test_compile_time_is_told_apart():
    lm = toys.tiny_model(hidden_size=48)
    first = kvjax.generate(lm, "hello there", max_new_tokens=4).stats
    second = kvjax.generate(lm, "hello there", max_new_tokens=4).stats
    assert first.compile_seconds > 0.2 and second.compile_seconds == 0
    assert first.time_to_first_token < first.compile_seconds


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_planned_bytes_are_the_live_buffers_bytes(policy):
    lm = toys.tiny_model()
    output = kvjax.generate(lm, [list(range(1, 100))] * 3, policy=policy, max_new_tokens=20)
    planned = kvjax.plan(lm, prompt_tokens=99, batch=3, policy=policy, max_new_tokens=20)
    whole = output[0]._cache.func.__self__  # the batch's cache, of which output.cache is a row
    assert planned.cache_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(whole)) == whole.nbytes
    assert planned.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    assert planned.capacities == tuple(layer.slots for layer in whole.layers)
    assert whole.batch == 4 and output[0].stats.cache_bytes * 4 == whole.nbytes  # a row of padding among them


def test_planned_bytes_are_right_after_growing_too():
    lm = toys.tiny_model(max_position=2048)
    output = kvjax.generate(lm, "x", max_new_tokens=600, chat=False)
    assert len(output.tokens) == 600 and output.cache.new_capacity == 1024
    planned = kvjax.plan(lm, prompt_tokens=1, max_new_tokens=600)
    assert planned.cache_bytes == output.cache.nbytes


def test_growing_keeps_every_bit():
    config = toys.tiny_config()
    cache = filled_cache(config, Full(), 2, 64)
    bigger = ONE_DEVICE.grow(cache, config=config, new_capacity=1024)
    for old, new in zip(cache.layers, bigger.layers, strict=True):
        pages = old.pages[0]
        for head in range(2):
            start_old, start_new = old.starts[head], new.starts[head]
            assert (new.kv.k[:, start_new : start_new + pages] == old.kv.k[:, start_old : start_old + pages]).all()
            assert not new.kv.v[:, start_new + pages : start_new + new.pages[head]].any()
        assert (old.length == new.length).all()
    assert bigger.new_capacity == 1024


@pytest.mark.parametrize(
    "policy",
    [Full(), LagKV(ratio=0.125, lag=16, sink=4), RazorAttention(heads=((0, 0), (1, 1)), inner=H2O(budget=64))],
    ids=["full", "lagkv", "groups of heads"],
)
def test_a_random_cache_is_filled_one_layer_after_the_other(policy):
    """Not with all layers' rows alive at once: for an H100, 8 layers of Llama 3.1 8B's size took 43 GB (8 x 32,768)."""

    def temporaries(layers: int) -> int:
        sizes = 2, 480, 16, jnp.dtype("float32"), MODEL
        lowered = synthetic._filled.lower(toys.tiny_config(num_layers=layers, head_dim=64), policy, *sizes)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(6) < 1.1 * temporaries(2)


def test_an_empty_cache_is_zero_everywhere():
    cache = empty_cache(toys.tiny_config(), LagKV(), 2, 128, 64, jnp.float32)
    assert all(not np.asarray(x).any() for layer in cache.layers for x in jax.tree.leaves(layer))


@pytest.mark.slow
def test_prefill_peak_estimate_is_near_the_compilers():
    sizes = {"num_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "max_position": 1 << 16}
    plain, mixed, sliding = (
        toys.tiny_config(**sizes, windows=windows, window_rope=RopeConfig(theta=50.0) if windows else None)
        for windows in ((), (None, 128), (128,))
    )
    cases = [(plain, *case) for case in itertools.product((Full(), LagKV(ratio=0.25)), (1, 2, 4))]
    cases += [(plain, KVzip(ratio=0.25), 1), (mixed, LagKV(ratio=0.25), 1)]
    for config, policy, rows in (*cases, (sliding, Full(), 1), (mixed, Full(), 1)):
        policy = for_model(policy, config)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        lowered = PREFILL_FRESH.lower(
            OneDevice(config, policy), abstract_decoder(config), ints(rows, 4096), ints(rows), ints(rows),
            prompt_capacity=4096, new_capacity=256, dtype=jnp.dtype("float32"), storage=MODEL,
        )  # fmt: skip
        actual = lowered.compile().memory_analysis().temp_size_in_bytes
        planned = prefill_peak_bytes(config, policy, rows, 4096, "float32", config.intermediate_size)
        # Rows of a batch that go through a layer in turns are counted beside those that wait.
        most = 1.5 if rows == 1 else 1.8
        assert 0.9 * actual <= planned <= most * actual, (config.windows, policy, rows, actual, planned)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rows"), [(2048, 1), (4096, 1), (4096, 4)])
def test_the_estimate_of_prompts_that_are_repeated_layer_by_layer_is_near_the_compilers(tokens, rows):
    """However many layers there are: they hold the prompt one after the other."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "max_position": 1 << 16}
    policy, config = KVzip(ratio=0.25), toys.tiny_config(**sizes, num_layers=16)
    device, read = OneDevice(config, policy), jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    passes = Passes(policy.signals.repeat, read, None, None)
    x, fed = (
        jax.ShapeDtypeStruct((*shape, config.hidden_size), jnp.float32)
        for shape in ((rows, tokens), (passes.most, rows, passes.width))
    )
    params = abstract_decoder(config)
    counts, flag = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    given = without_layers(params), params.layers[0], x, fed, LayerInput(read, (counts,) * 4, flag, flag)
    pages = device.pages(tokens, 256, MODEL)[0]
    lowered = PREFILL_LAYER_FRESH.lower(
        device, *given, number=0, pages=pages, dtype=jnp.dtype("float32"), storage=MODEL
    )
    found = lowered.compile().memory_analysis().temp_size_in_bytes + x.size * 4 + fed.size * 4
    plan = kvjax.plan(config, prompt_tokens=tokens, batch=rows, policy=policy)
    assert 0.9 * found <= plan.prefill_peak_bytes <= 1.6 * found, (found, plan.prefill_peak_bytes)
    scored = kvjax.plan(config, prompt_tokens=tokens, batch=rows, policy=policy, prompt_logprobs=True)
    assert scored.prefill_peak_bytes > 1.5 * plan.prefill_peak_bytes


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("policy", [*POLICIES, SHARED], ids=str)
def test_programs_lower_for_accelerators(policy, platform):
    config = toys.tiny_config()
    params = abstract_decoder(config, jnp.bfloat16)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    prefill = PREFILL_FRESH.trace(
        OneDevice(config, policy), params, ints(2, 64), ints(2), ints(2),
        prompt_capacity=64, new_capacity=32, dtype=jnp.dtype("bfloat16"), storage=MODEL,
    )  # fmt: skip
    state = decode_state(config, empty_cache(config, policy, 2, 64, 32, jnp.bfloat16))
    controls = benchmark_controls(config, 2)
    decode = DECODE_CHUNK.trace(OneDevice(config, policy), params, state, controls, jnp.int32(4))
    assert "stablehlo" in prefill.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo" in decode.lower(lowering_platforms=(platform,)).as_text()
    # The first token is drawn where the others are: written twice, sampling is a third of a small model's program.
    assert occurrences(decode.jaxpr.jaxpr, "random_bits") == 1


def occurrences(jaxpr: Jaxpr, primitive: str) -> int:
    """How often a primitive stands in a program, each call of a function counted."""
    inner = (sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params))
    return sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns) + sum(occurrences(x, primitive) for x in inner)
