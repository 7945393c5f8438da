"""Plans of conversations of rounds: the bytes that their questions are allocated."""

from __future__ import annotations

import numpy as np
import pytest
import toys

import kvjax
from kvjax.cache.buckets import MEDIUM, SHORT

POLICY = "round:watershed=2,top=0.25"


@pytest.fixture(scope="module")
def lm():
    return toys.tiny_model(num_layers=4, max_position=8192)


def prompts(count, tokens):
    return np.random.default_rng(tokens).integers(0, 256, (count, tokens)).tolist()


@pytest.mark.parametrize(
    ("batch", "tokens", "new", "options"),
    [
        (1, 300, 6, {}),
        (3, 300, 6, {}),  # as 4 rows
        (1, 300, 300, {}),  # decoded into what the prompt left of its bucket
        (2, 2300, 700, {}),  # decoded beyond it, so the pools grow
        (1, 100, 6, {"reserve_tokens": 2000}),
        (2, 2500, 6, {"storage": "int8"}),
    ],
)
def test_a_first_question_is_allocated_what_its_plan_says(lm, batch, tokens, new, options):
    planned = kvjax.plan(lm, prompt_tokens=tokens, batch=batch, policy=POLICY, max_new_tokens=new, **options)
    output = kvjax.generate(lm, prompts(batch, tokens), policy=POLICY, max_new_tokens=new, **options)[0]
    assert len(output.tokens) == new
    assert output.stats.device_cache_bytes == planned.cache_bytes
    assert planned.retained_fraction == 1 and planned.capacities[0][0] >= tokens


def test_only_a_question_that_others_follow_has_room_for_their_rounds(lm):
    """Above the watershed; both have 256 slots for decoded tokens beside."""
    alone, first = (
        kvjax.plan(lm, prompt_tokens=100, policy=POLICY, max_new_tokens=6, reserve_tokens=reserve)
        for reserve in (None, 2000)
    )
    assert alone.capacities == ((SHORT + 256,) * 2,) * 4
    assert first.capacities[2:] == ((MEDIUM + 256,) * 2,) * 2


@pytest.mark.parametrize(("batch", "context", "tokens"), [(2, 500, 40), (1, 3000, 40)])
def test_a_question_onto_a_context_is_allocated_what_its_plan_says(lm, batch, context, tokens):
    sizes = {"context_tokens": context, "prompt_tokens": tokens, "batch": batch}
    planned = kvjax.plan(lm, **sizes, policy=POLICY, max_new_tokens=6)
    asked = {"context": prompts(1, context)[0], "policy": POLICY, "max_new_tokens": 6}
    output = kvjax.generate(lm, prompts(batch, tokens), **asked)[0]
    assert output.stats.device_cache_bytes == planned.cache_bytes


@pytest.mark.parametrize("batch", [1, 3])
def test_what_does_not_fit_with_spare_slots_and_rows_is_allocated_without(lm, batch):
    sizes = {"prompt_tokens": 300, "batch": batch, "policy": POLICY, "max_new_tokens": 6}
    spacious = kvjax.plan(lm, **sizes)
    limit = spacious.total_bytes - 1
    planned = kvjax.plan(lm, **sizes, memory_limit=limit)
    outputs = kvjax.generate(lm, prompts(batch, 300), policy=POLICY, max_new_tokens=6, memory_limit=limit)
    assert outputs[0].stats.device_cache_bytes == planned.cache_bytes < spacious.cache_bytes
    later = [kvjax.generate(lm, [1, 2, 3], cache=output.cache, max_new_tokens=6).tokens for output in outputs]
    joined = [output.cache for output in outputs]
    again = kvjax.generate(lm, [[1, 2, 3]] * batch, cache=joined, max_new_tokens=6, memory_limit=limit)
    assert [output.tokens for output in again] == later
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.plan(lm, **sizes, memory_limit=planned.total_bytes - 1)


def test_prompts_of_rounds_are_not_scored(lm):
    for ask in (kvjax.plan, lambda lm, prompt_tokens, **more: kvjax.generate(lm, prompts(1, prompt_tokens), **more)):
        with pytest.raises(kvjax.UsageError, match="prompt_logprobs needs every layer's output"):
            ask(lm, prompt_tokens=50, policy=POLICY, prompt_logprobs=True)


def test_a_later_question_holds_the_selected_share_above_the_watershed(lm):
    planned = kvjax.plan(lm, prompt_tokens=8000, policy=POLICY)
    lower = upper = planned.cache_bytes / 2
    assert planned.later_bytes == pytest.approx(lower + upper * (2048 + 256) / (8192 + 256), rel=0.01)
    assert "later question" in planned.table()
    assert kvjax.plan(lm, prompt_tokens=8000).later_bytes is None
