"""What was compiled ahead is what calls need: they compile nothing any more."""

from __future__ import annotations

import numpy as np
import pytest
import toys
from support.compiled import compiled_programs

import kvjax

POLICY = "lagkv:ratio=0.5,lag=16"


def test_calls_of_the_warmed_forms_compile_nothing():
    lm = toys.tiny_model(max_position=8192)
    with compiled_programs() as programs:
        found = kvjax.warm(lm, lengths=[200], policy=POLICY, batch=[1, 3], chat=True)
        assert [(each.batch, each.tokens) for each in found] == [(1, 200), (3, 200), (0, 200)]
        assert found[0].programs == 2 and all(each.seconds > 0 for each in found)
        before = dict(programs)
        for rows in (1, 3):
            kvjax.generate(lm, [[7] * 150] * rows, policy=POLICY, max_new_tokens=9)
        talk = kvjax.Chat(lm, policy=POLICY, max_new_tokens=5)
        for text in ("hello", "and?", "so?"):
            talk.send(text)
        assert dict(programs) == before


def test_what_is_read_onto_a_context_is_warmed_with_one_as_long():
    lm = toys.tiny_model(max_position=8192, num_layers=2, hidden_size=16, intermediate_size=16)
    with compiled_programs() as programs:
        kvjax.warm(lm, lengths=[20], context="a" * 300, chat=True)
        before = dict(programs)
        talk = kvjax.Chat(lm, context="c" * 300, max_new_tokens=2)
        talk.send("hello")
        assert dict(programs) == before


def test_what_is_asked_of_a_cache_that_was_read_is_warmed_by_its_context():
    """Under a policy that shares a context, and one whose questions have copies."""
    lm = toys.tiny_model(max_position=8192, num_layers=1, hidden_size=16, intermediate_size=16)
    for policy, rows in (("full", 3), ("snapkv:ratio=0.25", 1)):
        with compiled_programs() as programs:
            kvjax.warm(lm, lengths=[20], batch=[rows], policy=policy, context="a" * 300)
            before = dict(programs)
            cache = kvjax.read(lm, "c" * 300, policy=policy)
            kvjax.generate(lm, ["hello", "and?", "so?"][:rows], cache=cache, max_new_tokens=2)
            assert dict(programs) == before, policy


def test_a_context_is_warmed_where_copies_of_one_that_was_read_do_not_fit():
    lm = toys.tiny_model(max_position=8192, num_layers=1, hidden_size=16, intermediate_size=16)
    options: dict = {"policy": "snapkv:ratio=0.25", "memory_limit": 4_500_000}
    kvjax.warm(lm, lengths=[20], batch=[3], context="a" * 300, **options)
    cache = kvjax.read(lm, "c" * 300, **options)
    with pytest.raises(kvjax.DoesNotFit):
        kvjax.generate(lm, ["hello", "and?", "so?"], cache=cache, max_new_tokens=2, memory_limit=4_500_000)


def test_reading_what_is_asked_later_is_told_where_the_rest_is():
    lm, events = toys.tiny_model(max_position=8192, num_layers=1, hidden_size=16, intermediate_size=16), []
    kvjax.warm(lm, lengths=[20], context="a" * 300, progress=events.append)
    # A context with its prompt, then one alone and the prompt onto it.
    assert [event.stage for event in events if event.finished].count("prefill") == 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "snapkv:ratio=0.25"])
def test_a_conversation_over_a_cache_that_was_read_is_warmed_by_its_context(policy):
    lm = toys.tiny_model(max_position=8192, num_layers=1, hidden_size=16, intermediate_size=16)
    with compiled_programs() as programs:
        kvjax.warm(lm, lengths=[20], context="a" * 300, policy=policy, chat=True)
        before = dict(programs)
        talk = kvjax.Chat(lm, max_new_tokens=2)
        talk.cache = kvjax.read(lm, "c" * 300, policy=policy)
        for text in ("hello", "and?", "so?"):
            talk.send(text)
        assert dict(programs) == before


def test_what_does_not_fit_together_is_not_answered_in_parts():
    lm = toys.tiny_model()
    kvjax.generate(lm, [[7] * 5] * 40, memory_limit=2_000_000, max_new_tokens=2)
    with pytest.raises(kvjax.DoesNotFit, match=r"a batch of \d+ would fit"):
        kvjax.warm(lm, lengths=[5], batch=[40], memory_limit=2_000_000)


@pytest.mark.slow
def test_lengths_of_several_buckets_are_warmed_each():
    lm = toys.tiny_model(max_position=8192)
    with compiled_programs() as programs:
        found = kvjax.warm(lm, lengths=[200, 600], policy=POLICY, batch=[1, 3], chat=True)
        forms = [(each.batch, each.tokens) for each in found]
        assert forms == [(1, 200), (3, 200), (0, 200), (1, 600), (3, 600), (0, 600)]
        before = dict(programs)
        for rows in (1, 3):
            kvjax.generate(lm, [[7] * 900] * rows, policy=POLICY, max_new_tokens=9)
        for texts in (("b" * 540, "c" * 540, "d"), ("b" * 540, "d")):
            talk = kvjax.Chat(lm, policy=POLICY, max_new_tokens=5)
            for text in texts:
                talk.send(text)
        assert dict(programs) == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [5000]}, "context of 512"),
        ({"batch": [0]}, "batch"),
        ({"policy": "lagk"}, "lagk"),
        ({"policy": 5}, "5 is not a policy"),
        ({"policy": []}, "list of policies is empty"),
        ({"policy": None, "lengths": [5000]}, "context of 512"),
        ({"batch": np.array(3)}, "batch"),
        ({"temprature": 1}, "temprature"),
        ({"lengths": (length for length in [3])}, "lengths is <generator"),
        ({"lengths": {}}, "lengths is {}"),
        ({"chat": "yes"}, "chat is 'yes'; give True or False"),
        ({"lm": "model"}, "model"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(tiny_model, options, sentence):
    with pytest.raises(kvjax.UsageError, match=sentence):
        kvjax.warm(**{"lm": tiny_model, **options})
