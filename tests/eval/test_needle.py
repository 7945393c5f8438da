"""The needle run: its plumbing on a toy model, and what it is for on the default model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import tokenizers
import toys
from support.needles import NeedleAnswer, NeedleResult, run_needles

from kvjax.errors import UsageError
from kvjax.eval import follow_ups
from kvjax.eval.material import make_prompts
from kvjax.eval.results import Settings
from kvjax.eval.ruler import Sample
from kvjax.policies import Full, LagKV
from kvjax.text.tokenizer import Tokenizer


def result(*scores: float) -> NeedleResult:
    sample = Sample(0, "", "", "", ("1",), 10)
    return NeedleResult(None, 10, tuple(NeedleAnswer(sample, "", score, 25, 100) for score in scores))


def test_statistics_of_a_result():
    mixed = result(1, 0, 0.5, 1)
    assert (mixed.hits, mixed.accuracy, mixed.cache_share) == (2, 0.625, 0.25)
    # Sample deviation sqrt(0.6875 / 3) over sqrt(4).
    assert mixed.standard_error == pytest.approx(math.sqrt(0.6875 / 3) / 2)
    assert result(1, 1).standard_error == 0
    assert math.isnan(result(1).standard_error)


def test_without_a_template_a_prompt_begins_as_the_model_expects_it():
    """Models without a chat template may expect a token at the beginning of a text, and answer nonsense without it."""
    lm = toys.needle_model()
    backend = tokenizers.Tokenizer.from_str(lm.tokenizer.to_json())
    plain = Tokenizer(tokenizers.Tokenizer.from_str(lm.tokenizer.to_json()))
    (start,) = plain.encode("<|start|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    begun = dataclasses.replace(lm, tokenizer=Tokenizer(backend))
    assert begun.tokenizer.prefix_ids == (start,)
    made = make_prompts(begun, Settings("needles", "float32", ("niah_single_1",), samples=2), "niah_single_1", 480)
    for context, whole in zip(made.contexts, made.wholes, strict=True):
        assert context[0] == start and context.count(start) == 1
        assert len(whole) + made.room <= 480
    (talk,) = follow_ups.make_conversations(plain, length=480, samples=1)
    assert follow_ups._tokens(begun.tokenizer, talk) == talk.length + 1


@pytest.mark.slow
@pytest.mark.parametrize("ask_after", [True, False])
def test_asks_the_toy_model(ask_after):
    lm = toys.tiny_model(max_position=4096)
    found = run_needles(lm, "lagkv:ratio=0.5", 1024, 3, max_new_tokens=4, ask_after=ask_after, batch=2)
    assert len(found.answers) == 3 and found.length == 1024
    assert len({answer.sample.context for answer in found.answers}) == 3
    assert all(0 < answer.cache_bytes < answer.full_cache_bytes for answer in found.answers)
    assert found.hits == 0, "a random model cannot know"


def test_bad_requests_are_one_sentence():
    lm = toys.tiny_model(max_position=4096)
    with pytest.raises(UsageError, match="batch is 0"):
        run_needles(lm, None, 1500, 1, batch=0)
    with pytest.raises(UsageError, match="no task 'passkey'"):
        run_needles(lm, None, 1500, 1, task="passkey")
    with pytest.raises(UsageError, match="100 tokens are too few"):
        run_needles(lm, None, 100, 1)


@pytest.mark.slow
def test_finds_needles_at_1500_tokens_in_three_quarters_of_a_cache(default_model):
    assert run_needles(default_model, LagKV(ratio=0.75), 1500, 2, max_new_tokens=12).hits == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Full(), LagKV(ratio=0.75)], ids=["full", "lagkv"])
def test_finds_every_needle_at_1500_tokens(policy, default_model):
    found = run_needles(default_model, policy, 1500, 10, max_new_tokens=12)
    assert found.hits == 10, [(answer.sample.outputs, answer.text) for answer in found.answers if answer.score < 1]
