"""Decode steps of a shape with random weights: every policy is measured, with what a profile would have said."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.bench import shapes
from kvjax.errors import UsageError
from kvjax.model.decoder import random_decoder
from kvjax.policies import parse, registry
from kvjax.policies.base import Policy
from kvjax.runtime.synthetic import weight_bytes_per_step

TINY = shapes.shapes()["tiny"]
LLAMA = shapes.shapes()["llama-3.1-8b"]
CONTEXT = 512


def test_every_registered_policy_is_there_by_default(monkeypatch):
    names = [text.partition(":")[0] for text in shapes.every_policy()]
    assert names == list(registry()) and names[0] == "full"
    measured = []

    def case(params, text, policy, *sizes):
        measured.append(text)
        return shapes.ShapeRow(1, 64, text)

    monkeypatch.setattr(shapes, "_case", case)
    shapes.measure("tiny", [1], [64], dtype="float32")
    assert tuple(measured) == shapes.every_policy()


def test_a_policy_of_no_size_is_measured_as_it_is(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Other(Policy):
        pass

    monkeypatch.setattr("kvjax.policies.registry", lambda: {"other": Other})
    assert shapes.every_policy() == ("other",)


#: Of the bytes that all tokens take, where it is not an eighth; marks, and the slot of a new token, are a hundredth.
LIVE = {
    "full": 1.0,
    "lagkv:ratio=0.125": 0.5,  # sinks and two whole partitions of 128 tokens are not compressed
    "round:top=0.125": 0.5625,  # one of two layers is below the watershed
}


@pytest.mark.slow
@pytest.mark.parametrize("text", shapes.every_policy())
def test_every_policy_runs_on_the_share_it_is_given(text):
    (row,) = shapes.measure("tiny", [2], [CONTEXT], [text], dtype="float32", rounds=1, steps=2)
    assert row.tokens_per_second > 0 and row.step_seconds > 0 and not row.note
    token = TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 2 * 4
    live = row.step_bytes - weight_bytes_per_step(random_decoder(TINY))
    assert live / (2 * CONTEXT * token) == pytest.approx(LIVE.get(text, 0.125), abs=0.01)


def test_a_cache_of_rounds_is_the_one_an_answer_is_decoded_from():
    """All tokens below the watershed, the selected share above it; positions go on from the context's end."""
    policy = shapes.with_profile(parse("round:top=0.25,watershed=1"), TINY)
    cache = shapes._filled(TINY, policy, 3, CONTEXT, jnp.float32)
    lengths = [np.unique(layer.length).tolist() for layer in cache.layers]
    assert lengths == [[CONTEXT], [CONTEXT // 4]]
    assert np.unique(cache.seen).tolist() == [CONTEXT]
    for layer in cache.layers:
        assert min(layer.slots) >= np.max(layer.length) + 256
        np.testing.assert_array_equal(layer.next, layer.length)


def test_heads_that_razor_protects_are_spread_and_hold_half_of_its_share():
    heads = shapes.with_profile(parse("razor:ratio=0.125"), LLAMA).heads
    assert len(heads) == 16 == len({layer for layer, _ in heads})
    assert [sum(head == at for _, head in heads) for at in range(LLAMA.num_kv_heads)] == [2] * 8
    assert heads == shapes.with_profile(parse("razor:ratio=0.125"), LLAMA).heads
    assert len(shapes.with_profile(parse("razor"), LLAMA).heads) == 38  # 15 % of 256
    named = shapes.with_profile(parse("razor:ratio=0.5,heads=1.1"), TINY)
    assert named.heads == ((1, 1),)


@pytest.mark.parametrize("shape", shapes.shapes().values(), ids=shapes.shapes())
@pytest.mark.parametrize("ratio", [0.1, 0.125, 0.5, 0.9])
def test_any_share_leaves_something_to_the_other_heads(shape, ratio):
    policy = shapes.with_profile(parse(f"razor:ratio={ratio}"), shape)
    assert len(set(policy.heads)) == len(policy.heads) == int(shape.num_layers * shape.num_kv_heads * ratio / 2)
    assert policy.others(shape).ratio > 0.4 * ratio


def test_rounds_have_a_watershed():
    assert shapes.with_profile(parse("round"), LLAMA).watershed == 14
    assert shapes.with_profile(parse("round"), TINY).watershed == 1
    assert shapes.with_profile(parse("round:watershed=9"), LLAMA).watershed == 9
    with pytest.raises(UsageError, match="this model has 2 layers"):
        shapes.measure("tiny", [1], [64], ["round:watershed=2"], dtype="float32")


def test_steps_beyond_those_of_one_program_are_refused():
    with pytest.raises(UsageError, match="steps is 65"):
        shapes.measure("tiny", [1], [64], steps=65)


def test_no_weights_are_made_for_cases_that_have_no_memory():
    """A batch of millions has its note at once; random weights of 8B would take minutes, and say that they are made."""
    said = []
    rows = shapes.measure("llama-3.1-8b", [2**20], [1024], ["full", "lagkv:ratio=0.25"], say=said.append)
    assert not said
    assert [row.policy for row in rows] == ["full", "lagkv:ratio=0.25"]
    assert all(row.note and row.note.startswith("needs ") and "the device has" in row.note for row in rows)


@pytest.mark.slow
def test_the_command_of_a_bare_machine(capsys):
    sizes = "--shape tiny --dtype float32 --batch 1 --context 64 --rounds 1".split()
    assert shapes.main([*sizes, "--policy", "razor:ratio=0.5", "--policy", "round"]) == 0
    out = capsys.readouterr().out
    assert "| 1 | 64 | razor:ratio=0.5 |" in out and "| 1 | 64 | round |" in out
    assert shapes.main([*sizes, "--policy", "round:watershed=2"]) == 2
    assert "watershed is 2" in capsys.readouterr().err
