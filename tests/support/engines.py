"""A tiny model's engines: their requests, and what `generate` answers to each alone."""

from __future__ import annotations

import numpy as np
from toys import tiny_model

import kvjax
from kvjax.engine.core import EngineCore
from kvjax.engine.row import Row
from kvjax.options import GenerationOptions
from kvjax.request import Request

LM = tiny_model(max_position=1024)
#: Options of requests that differ in everything that a row may have for itself.
KINDS = (
    {},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.4},
    {"stop": ["a", "zz"], "temperature": 1.0},
    {"logprobs": True, "min_p": 0.01, "temperature": 0.7},
    {"stop": "e", "stop_token_ids": [65, 66], "temperature": 1.0},
)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def alone(prompt: list[int], policy: str | kvjax.Policy, storage: str | None = None, **options) -> kvjax.Output:
    return kvjax.generate(LM, prompt, policy=policy, storage=storage, chat=False, **options)


def assert_same(found: kvjax.Output, wanted: kvjax.Output) -> None:
    assert found.tokens == wanted.tokens
    assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)
    assert found.stats.retained == wanted.stats.retained and found.stats.seen == wanted.stats.seen
    assert found.stats.clipped == wanted.stats.clipped
    for own, other in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert [x is None for x in own] == [x is None for x in other]
            np.testing.assert_allclose([x or 0 for x in own], [x or 0 for x in other], atol=1e-4)


POLICY = "lagkv:ratio=0.5,lag=16,sink=4"


def make_row(core: EngineCore, prompt: list[int], **options) -> Row:
    chosen = GenerationOptions(policy=core.policy.chosen, storage=core.storage, chat=False, **options)
    return core.slots.row_of(Request(core.lm, prompt, chosen, exact=True), limit=chosen.max_new_tokens)
