"""A prompt read layer by layer gives what one program of all layers gives, to the bit, and compiles less."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import toys
from support.compiled import compiled_programs

import kvjax
from kvjax import progress
from kvjax.cache.quantisation import MODEL
from kvjax.committed import committed
from kvjax.runtime import prefill_batches, prefill_by_layers, prefill_choosing_by_layers, single_layer_programs
from kvjax.runtime.alike_layers import can_stop_between_layers, compiles_faster_by_layers
from kvjax.runtime.prefill_by_layers import reading_by_layers
from kvjax.runtime.programs import Programs
from kvjax.runtime.single_layer_programs import LayerwisePrompt
from kvjax.sharding.mesh import Mesh

CASES = [
    ("full", "model"),
    ("lagkv:ratio=0.5,lag=8", "int8"),
    pytest.param("snapkv:ratio=0.5", "model", marks=pytest.mark.slow),
]
#: Of several passes and of one, within other policies, and of models of other layers. The first compiles least.
REPEATED = [
    ("kvzip:ratio=0.5,chunk=32", "int8", {}),
    ("kvzip:ratio=0.5,chunk=32", "model", {"windows": (16, None, 16), "num_layers": 3}),
    ("kvzip:ratio=0.5", "model", {"positional": "alibi"}),
    ("adaptive:ratio=0.5,inner=kvzip(chunk=32)", "model", {}),
    ("razor:ratio=0.6,heads=0.0+1.1,inner=kvzip(chunk=32)", "model", {}),
    ("criticalkv:ratio=0.5,inner=kvzip", "model", {}),
]
#: Chosen in all layers together: with a sum of all, with marks and int8, and repeated.
TOGETHER = [
    ("adaptive:ratio=0.5,inner=keydiff,scope=model", "model", {}),
    ("adaptive:ratio=0.5,inner=snapkv,scope=model,floor=0", "int8", {"positional": "alibi"}),
    ("adaptive:ratio=0.5,inner=kvzip(chunk=32),scope=model", "model", {}),
    ("adaptive:ratio=0.5,inner=kvzip(chunk=32),scope=model", "int8", {}),
]
SMALL = {"num_layers": 2, "hidden_size": 16, "intermediate_size": 16}
PROMPT, OTHER, QUESTION = list(range(3, 100)), list(range(60, 20, -1)), [7, 8, 9, 1, 2]


@pytest.fixture(scope="module")
def lm(tiny_model):
    """As many layers as make it worth it; ``tiny_model`` sets how it is compiled."""
    return toys.tiny_model(num_layers=4, hidden_size=16, intermediate_size=16)


def facts(output):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(output.cache)]
    return output.tokens, output.logprobs, output.stats.retained, output.cache.nbytes, leaves


@pytest.mark.parametrize(("policy", "storage"), CASES)
def test_prompts_contexts_and_turns_are_those_of_one_program(lm, monkeypatch, policy, storage):
    check(lm, monkeypatch, policy, storage, ("prefill_layer_fresh", "prefill_layer_onto"))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "storage", "layers"), REPEATED)
def test_prompts_that_are_repeated_are_those_of_one_program(lm, monkeypatch, policy, storage, layers):
    lm = toys.tiny_model(**{**SMALL, **layers})
    check(lm, monkeypatch, policy, storage, ("prefill_layer_fresh", "prefill_layer_onto"))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "storage", "layers"), TOGETHER)
def test_prompts_that_layers_choose_of_together_are_those_of_one_program(monkeypatch, policy, storage, layers):
    lm = toys.tiny_model(**{**SMALL, **layers})
    check(lm, monkeypatch, policy, storage, ("hold_and_weigh_layer", "lay_out_layer"))


def check(lm, monkeypatch, policy, storage, names):
    how = {"policy": policy, "max_new_tokens": 4, "stop_token_ids": (), "logprobs": True, "storage": storage}

    def answers():
        first = kvjax.generate(lm, [PROMPT, OTHER], **how)
        turn = {key: value for key, value in how.items() if key not in ("policy", "storage")}
        return [
            *map(facts, first),
            facts(kvjax.generate(lm, QUESTION, cache=first[0].cache, **turn)),
            *(facts(one) for one in kvjax.generate(lm, [QUESTION, OTHER], context=PROMPT, **how)),
        ]

    monkeypatch.setattr(prefill_batches, "compiles_faster_by_layers", lambda *_: True)
    with compiled_programs() as programs:
        found = answers()
    assert all(programs[name] for name in names) and not programs["prefill_fresh"] and not programs["prefill_onto"]
    monkeypatch.setattr(prefill_batches, "compiles_faster_by_layers", lambda *_: False)
    with compiled_programs() as programs:
        assert answers() == found
    assert programs["prefill_fresh"] and not programs[names[0]]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ("full", ["prefill_layer_fresh"]),
        ("kvzip:ratio=0.5", ["prefill_layer_fresh"]),
        ("adaptive:ratio=0.5,inner=kvzip,scope=model", ["hold_and_weigh_layer", "lay_out_layer"]),
    ],
)
def test_layers_of_one_kind_share_one_program(lm, policy, names, loaded):
    """Also the first, whose input no layer made; weights that are loaded are committed to their device."""
    if loaded:
        lm = dataclasses.replace(lm, params=committed(lm.params))
    with compiled_programs() as programs:
        kvjax.generate(lm, PROMPT, policy=policy, max_new_tokens=1)
    assert dict(programs) == dict.fromkeys([*names, "decode_chunk"], 1)


def test_layers_of_each_window_are_a_kind():
    windows = (8, None) * 4
    with compiled_programs() as programs:
        kvjax.generate(toys.tiny_model(num_layers=8, windows=windows), PROMPT, max_new_tokens=1)
    assert programs["prefill_layer_fresh"] == 2


def test_an_accelerator_makes_the_zeros_that_a_cpu_is_handed(lm, monkeypatch):
    handed = kvjax.generate(lm, PROMPT, max_new_tokens=4)
    for room in (single_layer_programs, prefill_choosing_by_layers):
        monkeypatch.setattr(room, "zeros_are_sent", lambda: False)
    with compiled_programs() as programs:
        assert kvjax.generate(lm, PROMPT, max_new_tokens=4).tokens == handed.tokens
    assert programs["hidden_states"] == 1
    with compiled_programs() as programs:  # of the prompt, and of the passes that repeat it
        kvjax.generate(lm, PROMPT, policy="kvzip:ratio=0.5", max_new_tokens=4)
    assert programs["hidden_states"] == 2 and programs["prefill_layer_fresh"] == 1
    together = {"policy": "adaptive:ratio=0.5,inner=keydiff,scope=model", "max_new_tokens": 4}
    with compiled_programs() as programs:
        made = kvjax.generate(lm, PROMPT, **together)
    assert programs["empty_pool"] == 1
    monkeypatch.undo()
    assert made.tokens == kvjax.generate(lm, PROMPT, **together).tokens


def test_it_is_not_done_where_it_would_cost_more(lm):
    parse = kvjax.policies.parse
    assert not compiles_faster_by_layers(parse("full"), toys.tiny_config(num_layers=2))
    assert not compiles_faster_by_layers(parse("pyramidkv:ratio=0.5"), lm.config)  # every layer has a size of its own
    deep = toys.tiny_config(num_layers=16)
    assert compiles_faster_by_layers(parse("lagkv:ratio=0.5,lag=8"), deep)
    skipping = kvjax.LagKV(ratio=0.5, lag=8, variant="l2")  # the layers that it skips are kinds of their own
    assert not compiles_faster_by_layers(skipping, deep) and can_stop_between_layers(skipping, deep)
    together = parse("adaptive:inner=keydiff,ratio=0.5,scope=model")
    for other in (together, parse("kvzip:ratio=0.5")):  # on one device alone
        assert compiles_faster_by_layers(other, lm.config) and can_stop_between_layers(other, lm.config)
        assert not compiles_faster_by_layers(other, lm.config, Mesh(1, 2))
        assert not can_stop_between_layers(other, lm.config, Mesh(1, 2))


def test_a_cache_is_consumed_only_where_it_may_be(lm):
    def read(cache, consume):
        ids = np.array([[*QUESTION, *[0] * 11]], np.int32)
        count, before = np.array([len(QUESTION)], np.int32), 0 if cache is None else len(PROMPT)
        device = Programs().device(kvjax.Full(), lm.config)
        sizes = {"prompt_capacity": 128, "new_capacity": 8, "own_capacity": None}
        given = device, lm.params, cache, ids, count, count + before, consume, "float32", MODEL
        return prefill_batches.finished(reading_by_layers(LayerwisePrompt(*given, sizes, prefill_batches.unheard)))

    made = kvjax.read(lm, PROMPT)
    kept, logits = read(made, False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(made.layers))
    taken, again = read(made, True)
    assert all(leaf.is_deleted() for pool in made.pools for leaf in jax.tree.leaves(pool.kv))
    np.testing.assert_array_equal(logits, again)
    assert int(kept.seen[0]) == int(taken.seen[0]) == len(PROMPT) + len(QUESTION)


def test_a_turn_that_fails_between_layers_gives_the_conversation_back(lm, monkeypatch):
    chat = kvjax.Chat(lm, max_new_tokens=3)
    chat.send("Hello there")
    same = kvjax.Chat(lm, max_new_tokens=3)
    same.send("Hello there")
    program, calls = prefill_by_layers.PREFILL_LAYER_ONTO, []

    def failing(*arguments, **static):
        calls.append(static)
        if len(calls) == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return program(*arguments, **static)

    monkeypatch.setattr(prefill_by_layers, "PREFILL_LAYER_ONTO", failing)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        chat.send("And then?")
    assert len(calls) == 3
    monkeypatch.setattr(prefill_by_layers, "PREFILL_LAYER_ONTO", program)
    assert chat.send("And then?").tokens == same.send("And then?").tokens


def test_the_host_waits_before_it_is_far_ahead(monkeypatch):
    waited = []
    monkeypatch.setattr(single_layer_programs, "AHEAD", 2)
    monkeypatch.setattr(single_layer_programs, "ready", lambda last: waited.append(last.shape))
    kvjax.generate(toys.tiny_model(num_layers=5), PROMPT, max_new_tokens=1)
    assert waited == [(1,)] * 3


@pytest.mark.parametrize("policy", ["full", "kvzip:ratio=0.5,chunk=16"])
def test_progress_says_how_much_of_the_prompts_is_read(monkeypatch, policy):
    monkeypatch.setattr(single_layer_programs, "AHEAD", 0)
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(progress.Stage, "advance", lambda stage, more: told.append((stage.name, more)))
    lm = toys.tiny_model(num_layers=5)
    kvjax.generate(lm, [PROMPT, PROMPT[:3]], policy=policy, max_new_tokens=2, progress=lambda event: None)
    assert len(told) >= 5 and {name for name, _ in told} == {"prefill"}
    assert sum(more for _, more in told) == pytest.approx(len(PROMPT) + 3)
    told.clear()
    kvjax.generate(lm, PROMPT, context=PROMPT, policy=policy, max_new_tokens=2, progress=lambda event: None)
    assert sum(more for _, more in told) == pytest.approx(2 * len(PROMPT))
