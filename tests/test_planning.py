"""Plans: bytes before allocation, and refusals that name what really fits."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import toys

import kvjax
from kvjax.memory_needs import full_cache_bytes

CONFIG = toys.tiny_config(max_position=1 << 15)


def refusal(**request) -> str:
    with pytest.raises(kvjax.DoesNotFit) as caught:
        kvjax.plan(CONFIG, **request)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def exactly(**request) -> kvjax.Plan:
    """The plan without spare rows and buckets: what is allocated where they do not fit."""
    roomy = kvjax.plan(CONFIG, **request)
    tight = kvjax.plan(CONFIG, **request, memory_limit=roomy.total_bytes - 1)
    assert tight.total_bytes < roomy.total_bytes and tight.spare_bytes < roomy.spare_bytes
    return tight


def test_spare_bytes_are_what_a_plan_has_beyond_what_is_needed():
    needed = kvjax.plan(CONFIG, prompt_tokens=2048, batch=4, max_new_tokens=256)
    assert needed.spare_bytes <= 0.01 * needed.cache_bytes
    for rows, tokens in ((3, 2048), (4, 1000)):
        spare = kvjax.plan(CONFIG, prompt_tokens=tokens, batch=rows, max_new_tokens=256)
        assert spare.cache_bytes == needed.cache_bytes
        unused = 1 - rows * (tokens + 255) / (4 * 2303)
        assert spare.spare_bytes == pytest.approx(needed.cache_bytes * unused, rel=0.03)
    talk = kvjax.plan(CONFIG, prompt_tokens=20, reserve_tokens=4096)
    assert talk.capacities[0][0] >= 4096 + 256 and talk.spare_bytes > 0.9 * talk.cache_bytes
    assert "spare" in talk.table()


@pytest.mark.parametrize("policy", ["full", "lagkv:ratio=0.25", "streamingllm:window=200", "lagkv:prefill=chunked"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_refusal_names_requests_that_fit(policy, share):
    request = dict(prompt_tokens=20_000, batch=6, policy=policy, max_new_tokens=700)
    whole = exactly(**request)
    limit = int(whole.weights_bytes + share * (whole.total_bytes - whole.weights_bytes))
    sentence = refusal(**request, memory_limit=limit)
    offers = 0
    for tokens in re.findall(r"a batch of 1 with ([\d,]+) tokens", sentence):
        alone = request | {"batch": 1, "prompt_tokens": int(tokens.replace(",", ""))}
        offers += kvjax.plan(CONFIG, **alone, memory_limit=limit).total_bytes <= limit
    for batch in re.findall(r"a batch of ([\d,]+)\b(?! with)", sentence):
        offers += kvjax.plan(CONFIG, **(request | {"batch": int(batch)}), memory_limit=limit).total_bytes <= limit
        with pytest.raises(kvjax.DoesNotFit):  # and it is the largest
            kvjax.plan(CONFIG, **(request | {"batch": int(batch) + 1}), memory_limit=limit)
    for tokens in re.findall(r"prompts of ([\d,]+) tokens", sentence):
        shorter = request | {"prompt_tokens": int(tokens.replace(",", ""))}
        offers += kvjax.plan(CONFIG, **shorter, memory_limit=limit).total_bytes <= limit
    for other in re.findall(r'policy="([^"]+)"', sentence):
        offers += kvjax.plan(CONFIG, **(request | {"policy": other}), memory_limit=limit).total_bytes <= limit
    assert offers >= 1, sentence


def test_a_refusal_names_both_when_neither_alone_would_fit():
    request = dict(prompt_tokens=20_000, batch=64, policy="full")
    limit = kvjax.plan(CONFIG, prompt_tokens=300).total_bytes
    offer = re.search(r"; a batch of 1 with ([\d,]+) tokens would fit", refusal(**request, memory_limit=limit))
    assert offer is not None
    tokens = int(offer[1].replace(",", ""))
    kvjax.plan(CONFIG, prompt_tokens=tokens, memory_limit=limit, policy="full")
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.plan(CONFIG, prompt_tokens=tokens + 1, memory_limit=limit, policy="full")


def test_a_refusal_says_when_nothing_would_fit():
    assert "weights alone" in refusal(prompt_tokens=10, memory_limit=1000)
    one = kvjax.plan(CONFIG, prompt_tokens=1)
    assert "more memory" in refusal(prompt_tokens=1, memory_limit=one.weights_bytes + 1)


def test_exactly_enough_is_enough():
    total = exactly(prompt_tokens=3000, batch=2).total_bytes
    assert kvjax.plan(CONFIG, prompt_tokens=3000, batch=2, memory_limit=total).memory_limit == total
    refusal(prompt_tokens=3000, batch=2, memory_limit=total - 1)


def test_generation_is_refused_by_the_same_plan_before_it_allocates(tiny_model, monkeypatch):
    planned = kvjax.plan(tiny_model, prompt_tokens=400, batch=4, max_new_tokens=1)
    prompts, before = [[1] * 400] * 4, lambda *_, **__: pytest.fail("something ran")
    kvjax.generate(tiny_model, prompts, max_new_tokens=0, memory_limit=planned.total_bytes)
    cache = kvjax.generate(tiny_model, [1] * 50, max_new_tokens=1).cache
    for name in (
        "kvjax.runtime.prefill_batches.read_prompts",
        "kvjax.given_caches.adopt",
        "kvjax.given_caches.one_batch",
    ):
        monkeypatch.setattr(name, before)
    with pytest.raises(kvjax.DoesNotFit, match="batch of 3"):
        kvjax.generate(tiny_model, prompts, max_new_tokens=0, memory_limit=planned.total_bytes - 1)
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.generate(tiny_model, prompts, cache=cache, max_new_tokens=0, memory_limit=planned.total_bytes)
    with pytest.raises(kvjax.UsageError):
        kvjax.generate(tiny_model, prompts, cache=cache, policy="lagkv")
    with pytest.raises(kvjax.UsageError):
        kvjax.generate(tiny_model, [[1] * 500] * 4, cache=cache)


def test_bytes_follow_the_request():
    one, four = (kvjax.plan(CONFIG, prompt_tokens=5000, batch=batch) for batch in (1, 4))
    assert four.cache_bytes == 4 * one.cache_bytes and four.weights_bytes == one.weights_bytes
    half = kvjax.plan(CONFIG, prompt_tokens=5000, dtype="bfloat16")
    assert half.weights_bytes * 2 == one.weights_bytes and half.full_cache_bytes * 2 == one.full_cache_bytes
    assert one.full_cache_bytes == 2 * 2 * 2 * 8 * 4 * (5000 + 255) == full_cache_bytes(CONFIG, 5255, jnp.float32)
    assert one.total_bytes == one.weights_bytes + one.cache_bytes + one.prefill_peak_bytes
    bounded = [kvjax.plan(CONFIG, prompt_tokens=n, policy="streamingllm:window=200") for n in (500, 5000)]
    assert bounded[0].cache_bytes == bounded[1].cache_bytes and bounded[0].retained == ((204, 204), (204, 204))
    small = [kvjax.plan(CONFIG, prompt_tokens=5000, policy=f"lagkv:ratio={r}").cache_bytes for r in (0.125, 0.25, 0.5)]
    assert small[0] < small[1] < small[2] < one.cache_bytes
    # No more than the context can be generated, whatever is asked.
    assert kvjax.plan(CONFIG, prompt_tokens=32_000, max_new_tokens=10**9).capacities[0][0] <= 2 * CONFIG.max_position


def test_the_table_says_every_byte_and_head(tiny_model):
    planned = kvjax.plan(tiny_model, prompt_tokens=300, policy="lagkv:ratio=0.5,lag=16", memory_limit=1 << 30)
    text = planned.table()
    assert str(planned) == text
    for size in (planned.weights_bytes, planned.cache_bytes, planned.prefill_peak_bytes, planned.total_bytes):
        assert f"{size:,} bytes" in text
    assert "0-1" in text and f"2 x {planned.retained[0][0]}" in text and "1.07 GB" in text


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt_tokens": 0}, {"prompt_tokens": -1}, {"prompt_tokens": 1.5}, {"prompt_tokens": True},
        {"prompt_tokens": 1 << 16}, {"prompt_tokens": 1, "batch": 0}, {"prompt_tokens": 1, "max_new_tokens": -1},
        {"prompt_tokens": 1, "policy": "lagk"}, {"prompt_tokens": 1, "policy": 3},
        {"prompt_tokens": 1, "memory_limit": 0}, {"prompt_tokens": 1, "dtype": "float99"},
        {"prompt_tokens": 1, "dtype": "int8"}, {"prompt_tokens": 1, "dtype": "float64"},
    ],
    ids=str,
)  # fmt: skip
def test_plans_of_nonsense_are_refused_in_a_sentence(request_):
    with pytest.raises(kvjax.UsageError) as caught:
        kvjax.plan(CONFIG, **request_)
    assert "\n" not in str(caught.value)


def test_a_plan_is_of_a_model():
    with pytest.raises(kvjax.UsageError, match=r"kvjax\.load"):
        kvjax.plan("smollm2-135m-instruct", prompt_tokens=1)


@pytest.mark.parametrize(("policy", "fed"), [("streamingllm:window=200,positions=cache", 99), ("full", 12)])
def test_a_plan_counts_tokens_beyond_the_context_where_the_policy_goes_on(policy, fed):
    config = toys.tiny_config(max_position=512)
    planned = kvjax.plan(config, prompt_tokens=500, max_new_tokens=100, policy=policy)
    assert planned.full_cache_bytes == full_cache_bytes(config, 500 + fed, jnp.float32)


def on_gpu(monkeypatch, stats: dict | None, **environment: str) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
                 "XLA_PYTHON_CLIENT_ALLOCATOR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_a_plan_knows_what_jax_takes_of_a_gpu(monkeypatch):
    """A T4 has 15.8 GB, of which JAX takes three quarters unless it is told otherwise."""
    on_gpu(monkeypatch, {"bytes_limit": 11_850_000_000})
    planned = kvjax.plan(CONFIG, prompt_tokens=100)
    assert planned.memory_limit == 11_850_000_000
    assert planned.memory_source == "JAX reserves 75% of the GPU's 15.8 GB (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    assert planned.memory_source in planned.table()
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        on_gpu(monkeypatch, {"bytes_limit": 7_900_000_000}, **{name: ".5"})
        assert "reserves 50% of the GPU's 15.8 GB" in kvjax.plan(CONFIG, prompt_tokens=100).memory_source
    on_gpu(monkeypatch, {"bytes_limit": 11_850_000_000}, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert "takes as it is needed, beside other programs, 75%" in kvjax.plan(CONFIG, prompt_tokens=100).memory_source
    for stats in (None, {}):
        on_gpu(monkeypatch, stats, XLA_PYTHON_CLIENT_ALLOCATOR="platform")
        planned = kvjax.plan(CONFIG, prompt_tokens=100)
        assert planned.memory_limit is None and "XLA_PYTHON_CLIENT_ALLOCATOR" in planned.memory_source
    assert kvjax.plan(CONFIG, prompt_tokens=100, memory_limit=1 << 30).memory_source is None


def test_a_refusal_on_a_gpu_offers_the_part_that_jax_leaves(monkeypatch):
    request = {"prompt_tokens": 2048, "batch": 4}  # buckets, so that nothing is spare
    need = kvjax.plan(CONFIG, **request).total_bytes
    on_gpu(monkeypatch, {"bytes_limit": need - 1})
    assert "or XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 before Python starts would fit." in refusal(**request)
    on_gpu(monkeypatch, {"bytes_limit": need // 2})  # not even all of it would do
    assert "FRACTION" not in refusal(**request)
    on_gpu(monkeypatch, {"bytes_limit": need - 1}, XLA_PYTHON_CLIENT_MEM_FRACTION="0.95")
    assert "FRACTION" not in refusal(**request)


@pytest.mark.parametrize("dtype", ["float16", jnp.float16, "bfloat16"])
def test_16_bits_take_half(dtype):
    whole, half = (kvjax.plan(CONFIG, prompt_tokens=3000, dtype=d) for d in ("float32", dtype))
    assert whole.weights_bytes == 2 * half.weights_bytes and whole.full_cache_bytes == 2 * half.full_cache_bytes


def test_a_plan_says_where_the_context_ends_before_the_answer(tiny_model):
    most = tiny_model.config.max_position
    assert kvjax.plan(tiny_model, prompt_tokens=most - 20, max_new_tokens=21).notice is None
    planned = kvjax.plan(tiny_model, prompt_tokens=most - 20, max_new_tokens=500)
    assert f"context of {most:,} tokens has room for 21 new" in str(planned.notice)
    assert str(planned.notice) in planned.table()


def test_a_plan_says_whose_slots_and_tokens_it_lists(tiny_model):
    shared = kvjax.plan(tiny_model, prompt_tokens=20, context_tokens=200, batch=2).table()
    assert "slots of a row's own by KV head, and tokens retained of context and prompt" in shared
    alone = kvjax.plan(tiny_model, prompt_tokens=20).table()
    assert "layers, slots by KV head, and tokens retained of the prompt:" in alone
    padded = kvjax.plan(tiny_model, prompt_tokens=20, batch=3, mesh="data=2").table()
    assert "2 times" not in padded and "padded to 4 rows" in padded
    assert "padded" not in kvjax.plan(tiny_model, prompt_tokens=20, batch=4, mesh="data=2").table()


def test_scoring_a_prompt_needs_its_logits(tiny_model):
    request = {"prompt_tokens": 300, "batch": 2}
    plain, scored = (kvjax.plan(tiny_model, **request, prompt_logprobs=asked) for asked in (False, True))
    logits = 4 * 64 * tiny_model.config.vocab_size * 4  # rows of a bucket, tokens at once, bytes
    assert scored.prefill_peak_bytes - plain.prefill_peak_bytes == 2 * logits
    wide = dataclasses.replace(tiny_model.config, vocab_size=200_000)
    each = [kvjax.plan(wide, **request, prompt_logprobs=asked).prefill_peak_bytes for asked in (False, True)]
    assert 1 << 26 < each[1] - each[0] <= 2 << 26, "few logits are alive at a time"
    prompts = ["hello there " * 20] * 2
    limit = scored.total_bytes - 1
    kvjax.generate(tiny_model, prompts, max_new_tokens=0, memory_limit=limit)
    smaller = kvjax.plan(tiny_model, **request, prompt_logprobs=True, memory_limit=limit)
    assert smaller.cache_bytes < scored.cache_bytes, "spare rows are left out for them"
