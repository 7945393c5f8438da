"""Requests that make no sense: each one clear sentence, before anything runs or is allocated."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax.prompts import tokenize

PROMPTS = {
    "empty text": "", "empty list": [], "list of empty text": [""], "list of empty ids": [[]], "none": None,
    "list of none": [None], "a number": 3, "a numpy number": np.int64(3), "an array of no dimension": np.array(3),
    "fractions": [1.5, 2.5], "an array of fractions": np.array([1.5]), "bools": [True, False],
    "array of bools": np.array([True]),
    "bool among ids": [1, True], "negative id": [-1], "id beyond the vocabulary": [5, 259], "bytes": b"abc",
    "a list with bytes": [b"abc"], "a set": {1, 2}, "a generator": (x for x in [1]), "mixture": [1, "a"],
    "ids and messages": [[1, {"role": "user", "content": "a"}]], "one message": {"role": "user", "content": "a"},
    "no role": [{"content": "a"}], "no content": [{"role": "user"}],
    "content none": [{"role": "user", "content": None}],
    "content list": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "role number": [{"role": 1, "content": "a"}], "only an answer": [{"role": "assistant", "content": "a"}],
    "half a surrogate pair": "a\ud83d", "half a pair in a message": [{"role": "user", "content": "\udc00"}],
    "beyond the context": [1] * 513, "text beyond the context": "x" * 513, "3-d array": np.zeros((1, 1, 1), int),
    "an empty array": np.zeros((0,), int), "an array of no rows": np.zeros((2, 0), int),
}  # fmt: skip

OPTIONS = {
    "max_new_tokens": [-1, 1.5, True, None, "5", math.nan],
    "temperature": [-0.1, math.nan, math.inf, None, "hot", True],
    "top_k": [0, -1, 1.5, True, "3"],
    "top_p": [0, 0.0, -1, 1.01, math.nan, None],
    "min_p": [-0.1, 1.5, math.nan, None],
    "repetition_penalty": [0, -1, math.nan, math.inf, None],
    "seed": [-1, 1.5, None, 2**32],
    "n": [0, -1, 1.5, None, True],
    "stop": ["", [""], ["a", ""], [3], 3, b"ab", ["a\ud800"], {"a": 1}, "x" * 5000],
    "stop_token_ids": [[-1], [259], ["a"], [True], [1.5], 3, [None]],
    "policy": ["lagk", "", "lagkv:ratio=2", "lagkv:ratio", 3, [], "streamingllm:positions=x"],
    "context": ["", [], 3, [1], b"ab", "a\ud800", {"a": 1}],
    "memory_limit": [0, -1, 1.5, "8GB", True],
    "cache": [3, "cache", [], [None], {"a": 1}],
}


@pytest.fixture
def nothing_runs(monkeypatch):
    for name in (
        "kvjax.runtime.prefill_batches.read_prompts",
        "kvjax.given_caches.adopt",
        "kvjax.given_caches.one_batch",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("something ran"))


def refuse(lm, prompt, match: str | None = None, **options) -> str:
    for function in (kvjax.generate, kvjax.stream_generate):
        with pytest.raises(kvjax.UsageError, match=match) as caught:
            function(lm, prompt, **options)
        sentence = str(caught.value)
        assert "\n" not in sentence and sentence[0] not in " '\"" and sentence.endswith("."), sentence
        assert len(sentence) < 400
    return sentence


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_prompts(tiny_model, nothing_runs, prompt):
    refuse(tiny_model, prompt)
    if isinstance(prompt, str):
        refuse(tiny_model, prompt, chat=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in OPTIONS.items() for value in values],
    ids=lambda x: repr(x)[:20],
)
def test_options(tiny_model, nothing_runs, name, value):
    sentence = refuse(tiny_model, "hi", **{name: value})
    if name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
        assert sentence.startswith(f"{name} is {value!r}; give a ")


def test_combinations(tiny_model, nothing_runs):
    refuse(tiny_model, [{"role": "user", "content": "a"}], "chat=False", chat=False)
    refuse(tiny_model, [{"role": "system", "content": "a"}], "none", context="facts")
    refuse(tiny_model, "a", "context is 512", context="x" * 600)
    refuse(tiny_model, ["a", [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]], context="facts")
    refuse("smollm2-135m-instruct", "a", "kvjax.load")
    refuse(tiny_model, [1], "token id -3", context=[1, -3])


def test_wrong_caches(tiny_model, monkeypatch):
    cache = kvjax.generate(tiny_model, [1] * 20, policy="lagkv:lag=8", max_new_tokens=2).cache
    pair = kvjax.concatenate([cache, cache])
    other = kvjax.generate(toys.tiny_model(num_layers=1), [1, 2], max_new_tokens=0).cache
    gone = kvjax.generate(tiny_model, [1] * 20, policy="lagkv:lag=8", max_new_tokens=2).cache
    kvjax.generate(tiny_model, "x", cache=gone, consume_cache=True, max_new_tokens=1)
    for name in (
        "kvjax.runtime.prefill_batches.read_prompts",
        "kvjax.given_caches.adopt",
        "kvjax.given_caches.one_batch",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("something ran"))
    refuse(tiny_model, "x", "another model", cache=other)
    refuse(tiny_model, ["x"] * 3, "2 rows and there are 3 prompts", cache=pair)
    refuse(tiny_model, "x", "2 rows and there is 1 prompt;", cache=pair)
    refuse(tiny_model, ["x"] * 3, "2 rows", cache=[cache, cache])
    refuse(tiny_model, "x", "consumed", cache=gone)
    refuse(tiny_model, ["x", "y"], "consumed", cache=[cache, gone])
    refuse(tiny_model, "x", "leave policy= out", cache=cache, policy="full")
    refuse(tiny_model, "x", "either context= or cache=", cache=cache, context="a")
    refuse(tiny_model, "x" * 500, "of the conversation", cache=cache)
    refuse(tiny_model, "x", "Output was given", cache=kvjax.Output("", (), "stop", None, None, lambda: cache))  # type: ignore[arg-type]
    with pytest.raises(kvjax.UsageError, match="rows are 0 to 1"):
        pair.row(2)
    for caches in ([], [cache, other], [cache, kvjax.Cache(cache.layers, *[cache.seen] * 3, kvjax.Full(), 64, 256)]):
        with pytest.raises(kvjax.UsageError):
            kvjax.concatenate(caches)


def test_a_model_without_template_takes_plain_text_only(tiny_model):
    import dataclasses

    bare = dataclasses.replace(tiny_model, tokenizer=toys.byte_tokenizer())
    bare.tokenizer.chat_template = None
    refuse(bare, "x", "chat=False")


@pytest.mark.parametrize(
    "prompt",
    [[1, 2], (1, 2), np.array([1, 2], np.int16), jnp.array([1, 2]), [np.int32(1), np.int64(2)], range(1, 3),
     [jnp.int32(1), 2]],
    ids=lambda p: type(p).__name__,
)  # fmt: skip
def test_every_kind_of_sequence_holds_token_ids(tiny_model, prompt):
    found = tokenize(tiny_model, prompt, context=None, chat=True, onto=False)
    assert found.prompts == ((1, 2),) and found.single and all(type(i) is int for i in found.prompts[0])
    listed = tokenize(tiny_model, [prompt, prompt], context=None, chat=True, onto=False)
    assert listed.prompts == ((1, 2), (1, 2)) and not listed.single


def test_lists_mix_prompts_of_every_form(tiny_model):
    found = tokenize(tiny_model, ["a", [1], [{"role": "user", "content": "a"}]], context=None, chat=True, onto=False)
    assert found.prompts[0] == found.prompts[2] != found.prompts[1] == (1,) and not found.single
    assert tokenize(tiny_model, np.array([[1, 2], [3, 4]]), context=None, chat=True, onto=False).prompts == (
        (1, 2),
        (3, 4),
    )
