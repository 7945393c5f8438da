"""What is compiled is counted: a conversation's turns and random requests share a few programs."""

from __future__ import annotations

import dataclasses
import random

import pytest
import toys
from support.compiled import compiled_programs
from support.scorers import with_profiles

import kvjax
from kvjax.committed import committed
from kvjax.policies import parse
from kvjax.policies.names import POLICIES

PREFILL = (
    *("prefill_fresh", "prefill_onto", "lower_onto", "upper"),
    *("prefill_layer_fresh", "prefill_layer_onto", "hold_and_weigh_layer", "lay_out_layer"),
)
#: Options without which a policy does not run on a toy model, or does nothing in a short conversation.
OPTIONS = {
    "lagkv": ":ratio=0.5,lag=16",
    "streamingllm": ":window=60",
    "razor": ":heads=0.0",
    "round": ":watershed=1",
    "compensated": ":budget=64",
}
#: One of each kind; the others are counted by ``pytest -m slow``.
KINDS = ("full", "round")


@pytest.fixture(scope="module")
def lm(tiny_model):
    """A toy with a context that twenty turns do not fill; ``tiny_model`` sets how it is compiled."""
    return as_loaded(toys.tiny_model(max_position=8192, num_layers=2, hidden_size=16, intermediate_size=16))


@pytest.fixture(scope="module")
def deep(tiny_model):
    """One of as many layers as are read by programs of one layer, where a policy treats them alike."""
    return as_loaded(toys.tiny_model(max_position=8192, num_layers=8, hidden_size=16, intermediate_size=16))


def as_loaded(lm):
    """The toy with weights that are committed, as those of files are: what meets them has programs of its own."""
    return dataclasses.replace(lm, params=committed(lm.params))


def counted(programs, names) -> int:
    return sum(programs[name] for name in names)


@pytest.mark.parametrize("name", [pytest.param(p, marks=() if p in KINDS else pytest.mark.slow) for p in POLICIES])
def test_twenty_turns_compile_a_few_programs_and_none_after_the_eighth(lm, name):
    check_turns(lm, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_twenty_turns_of_a_deep_model_compile_no_more(deep, name):
    check_turns(deep, name)


@pytest.mark.slow
def test_prompts_that_are_repeated_and_layers_that_choose_together_take_no_more(deep):
    """A layer's reading, repeated, and laying out, of the first turn and of later ones."""
    check_turns(deep, "adaptive:ratio=0.5,inner=kvzip,scope=model")


def check_turns(lm, name):
    draw = random.Random(7)
    with compiled_programs() as programs:
        policy = with_profiles(parse(name + OPTIONS.get(name, "")), lm.config)
        chat = kvjax.Chat(lm, policy=policy, max_new_tokens=8)
        early = None
        for turn in range(20):
            chat.send("".join(draw.choice("etaoin shrdlu") for _ in range(draw.randint(10, 200))))
            early = dict(programs) if turn == 7 else early
    assert counted(programs, PREFILL) <= 4 and programs["decode_chunk"] == 1, programs
    assert dict(programs) == early


def mixed(draw: random.Random) -> list[int]:
    """Prompts whose longest is nearly always of the second bucket."""
    return [draw.randint(5, 1500) for _ in range(draw.randint(1, 8))]


def equal(draw: random.Random) -> list[int]:
    """As many short requests as long ones, so that every size of a batch meets every bucket."""
    return [draw.randint(5, 1500) if draw.random() < 0.5 else draw.randint(5, 200)] * draw.randint(1, 8)


def check_requests(lm, policy, requests, draw):
    with compiled_programs() as programs:
        for i, counts in enumerate(requests):
            prompts = [[draw.randrange(256) for _ in range(count)] for count in counts]
            outputs = kvjax.generate(lm, prompts, policy=policy, max_new_tokens=2, logprobs=i % 2 == 0)
            assert [output.stats.prompt_tokens for output in outputs] == counts
    assert sum(programs.values()) <= 12, programs


def test_requests_of_every_batch_and_bucket_share_their_programs(deep):
    """Two and more of each pair of buckets: all that 40 requests of 1 to 8 prompts of 5 to 1,500 tokens can be in."""
    requests = [[length] * rows for rows in (1, 2, 4, 5, 8) for length in (20, 256, 257)] + [[300]]
    check_requests(deep, "full", requests, random.Random(3))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [mixed, equal])
@pytest.mark.parametrize(
    "policy", ["full", "lagkv:ratio=0.5,lag=16", "h2o:ratio=0.5", "kvzip:ratio=0.5", "round:watershed=1"]
)
@pytest.mark.parametrize("model", ["lm", "deep"])
def test_random_requests_share_their_programs(request, model, policy, lengths):
    draw = random.Random(3)
    check_requests(request.getfixturevalue(model), policy, [lengths(draw) for _ in range(40)], draw)


def test_batches_of_rounds_share_the_programs_of_their_bucket(lm):
    """1, 4 and 8 rows, however long the answers are."""
    with compiled_programs() as programs:
        for rows in range(1, 9):
            outputs = kvjax.generate(lm, [[5, 6, 7]] * rows, policy="round:watershed=1", max_new_tokens=20)
            assert len({output.tokens for output in outputs}) == 1
    assert dict(programs) == {"prefill_fresh": 3, "decode_chunk": 3}


def test_later_turns_of_rounds_share_programs_under_weights_that_are_not_committed():
    """What comes back from the host is committed, and so is a first question's cache."""
    lm = toys.tiny_model(num_layers=2, hidden_size=16, intermediate_size=16)
    with compiled_programs() as programs:
        chat = kvjax.Chat(lm, policy="round:watershed=1", max_new_tokens=4)
        for said in ("one", "two", "three"):
            chat.send(said)
    assert [programs[name] for name in ("lower_onto", "upper", "decode_chunk")] == [1, 1, 1], programs


def test_a_conversation_that_was_parked_and_saved_compiles_no_step_anew(lm, tmp_path):
    """What comes from the host is committed, and so are weights that are loaded."""
    with compiled_programs() as programs:
        chat = kvjax.Chat(lm, max_new_tokens=4)
        chat.send("one")
        chat.send("two")
        before = dict(programs)
        chat.park()
        chat.send("three")
        assert dict(programs) == before
        chat.save(tmp_path / "saved")
        kvjax.Chat.load(tmp_path / "saved", lm).send("four")
    names = "prefill_fresh", "prefill_onto", "decode_chunk"
    assert [programs[name] for name in names] == [before[name] for name in names] == [1, 1, 1], programs


def test_an_engine_continues_what_was_in_host_memory_with_the_programs_it_has(lm):
    held = kvjax.generate(lm, [1, 2, 3], max_new_tokens=2).cache
    with compiled_programs() as programs, kvjax.Engine(lm, slots=2) as engine:
        for cache in (None, held):
            engine.submit([5, 6], cache=cache, max_new_tokens=3).result(60)
        before = dict(programs)
        for cache in (held.to_host(), None):
            engine.submit([5, 6], cache=cache, max_new_tokens=3).result(60)
    assert dict(programs) == before


def test_an_engine_runs_its_own_programs_again_after_a_request_that_needed_larger_ones(lm):
    """Many stop ids, and stop strings of many bytes: two programs each, once."""
    with compiled_programs() as programs, kvjax.Engine(lm, slots=2, prompt_tokens=64, new_tokens=16) as engine:

        def asked(**options) -> tuple[int, ...]:
            return engine.submit([5, 6], max_new_tokens=8, **options).result(60).tokens

        plain, warm = asked(), dict(programs)
        for options in ({"stop_token_ids": range(200, 230)}, {"stop": [chr(97 + i) * 12 for i in range(9)]}):
            before = dict(programs)
            for _ in range(2):
                asked(**options)
                assert asked() == plain
            more = {name: count - before[name] for name, count in programs.items()}
            assert {name: count for name, count in more.items() if count} == {"insert": 1, "decode_chunk": 1}
    assert warm["insert"] == warm["decode_chunk"] == 1


def test_counting_what_is_kept_compiles_nothing(lm):
    with compiled_programs() as programs:
        kvjax.generate(lm, [1, 2, 3], policy="h2o:ratio=0.5", max_new_tokens=2)
    assert set(programs) == {"prefill_fresh", "decode_chunk"}, programs


def test_log_probabilities_are_of_the_same_program(lm):
    with compiled_programs() as programs:
        plain = kvjax.generate(lm, [1, 2, 3], max_new_tokens=4)
        before = dict(programs)
        told = kvjax.generate(lm, [1, 2, 3], max_new_tokens=4, logprobs=True)
    assert dict(programs) == before and plain.tokens == told.tokens
    assert plain.logprobs is None and told.logprobs is not None and max(told.logprobs) < 0
