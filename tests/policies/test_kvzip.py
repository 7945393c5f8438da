"""KVzip's choices against an oracle in NumPy; what the repetition hands over is tested in tests/runtime."""

from __future__ import annotations

import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choosing import ChoosingHead, assert_alone, assert_same, best

import kvjax
from kvjax.errors import UsageError
from kvjax.eval.ruler import make_samples
from kvjax.policies import KVzip, format_policy, parse
from kvjax.policies.kvzip import FIRST, LATER
from kvjax.saving.description import policy_from_json, policy_to_json

BUDGET, SINK = 12, 3
CHOSEN = KVzip(budget=BUDGET, sink=SINK)


class KVzipHead(ChoosingHead):
    def __init__(self, *args, **place):
        super().__init__(*args, **place)
        self.found: dict[int, float] = {}

    def budget(self, total: int) -> int:
        return BUDGET

    def noted(self, new):
        self.found |= {
            t: max(1 / (1 + np.exp(-q[t, 0])) for q in self.q) for t in new
        }  # as support/dense.py hands over

    def choose(self, candidates, new, budget):
        average = np.mean([self.found[t] for t in candidates if t in self.found])
        scores = np.array([self.found.get(t, average) for t in candidates])
        return candidates[:SINK] + [candidates[SINK + i] for i in best(scores[SINK:], budget - SINK)]


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_the_most_attended_stay_and_the_sinks(heads, group):
    assert_same(CHOSEN, KVzipHead, [("read", [1, SINK, BUDGET, BUDGET + 1, 70])], heads=heads, group=group)


def test_later_turns_keep_what_was_found_and_give_decoded_tokens_the_average():
    events = [("read", [30, 14, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(CHOSEN, KVzipHead, events, heads=2, group=2, seed=5)


def test_a_row_equals_the_row_alone():
    assert_alone(CHOSEN, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(CHOSEN, KVzipHead, [("read", lengths)], heads=1, group=2, seed=seed)


@pytest.mark.slow
def test_the_tokenizer_says_how_the_request_is_written_also_within_another_policy():
    lm = toys.tiny_model()
    for policy in (CHOSEN, kvjax.ChunkKV(budget=20, inner=KVzip()), kvjax.Razor(inner=KVzip(budget=9), heads="0.0")):
        output = kvjax.generate(lm, "Who is there? " * 4, policy=policy, max_new_tokens=2)
        asked = output.cache.policy.signals.repeat
        end = "<|end|>\n<|start|>assistant\n"
        for ids, text in ((asked.first, FIRST), (asked.later, LATER), (asked.end, end)):
            assert list(ids) == lm.tokenizer.encode(text), text
        assert format_policy(output.cache.policy) == format_policy(policy), "no option of the user's"
        assert policy_from_json(policy_to_json(output.cache.policy)) == output.cache.policy
        again = kvjax.generate(lm, "And now?", cache=output.cache, policy=policy, max_new_tokens=2)
        assert again.cache.policy == output.cache.policy


@pytest.mark.slow
def test_what_it_costs_is_said_of_every_row():
    lm = toys.tiny_model()
    words = len(lm.tokenizer.encode(FIRST + "<|end|>\n<|start|>assistant\n"))
    one, other = kvjax.generate(lm, [[65] * 40, [66] * 7], policy=CHOSEN, max_new_tokens=1)
    assert (one.stats.repeated_tokens, other.stats.repeated_tokens) == (40 + words, 7 + words)
    after = kvjax.generate(lm, [[66] * 7], context=[65] * 40, policy=CHOSEN, max_new_tokens=1)[0]
    assert after.stats.repeated_tokens == 47 + 2 * words
    assert kvjax.generate(lm, [66] * 7, max_new_tokens=1).stats.repeated_tokens == 0


def test_a_prompt_whose_repetition_does_not_fit_the_context_is_said_once():
    config = toys.tiny_config(max_position=100)
    assert CHOSEN.notice(config, 46) is None  # 46 tokens, 8 that a later request goes on with, and 46 again
    assert "at positions up to 102; this model knows 100" in str(CHOSEN.notice(config, 47))
    assert not CHOSEN.useless(config, 47), "poor scores are scores"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVzip, "useless", lambda self, config, total: True)
        assert kvjax.CriticalKV(ratio=0.5, inner=KVzip()).useless(config, 47), (
            "and of policies over one it is asked too"
        )


@pytest.mark.parametrize("bad", [dict(sink=-1), dict(words=3), dict(chunk=1), dict(ratio=0), dict(budget=SINK)])
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        KVzip(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_what_the_tokenizer_says_is_no_option_and_rounds_are_not_repeated():
    with pytest.raises(UsageError, match="has no option 'words'"):
        parse("kvzip:words=3")
    with pytest.raises(UsageError, match="KVzip cannot compress a finished round"):
        parse("round:inner=kvzip")


@pytest.mark.model
@pytest.mark.slow
def test_needles_are_found_in_a_quarter_of_the_cache(default_model):
    """The context is compressed before the question is known."""
    samples = make_samples(default_model.tokenizer, length=700, samples=4, seed=1)
    found = 0
    for sample in samples:
        question = sample.question + sample.answer_prefix
        options = dict(context=sample.context, chat=False, max_new_tokens=16)
        output = kvjax.generate(default_model, question, policy="kvzip:ratio=0.25", **options)
        found += all(value in output.text for value in sample.outputs)
        assert output.stats.live_cache_bytes < 0.3 * output.stats.full_cache_bytes
    assert found >= 3
