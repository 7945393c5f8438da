"""What holds for every policy that drops a token at each step, whatever its scores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.evictor import ROOM, Evictor, layer_config, random_qkv

import kvjax
from kvjax.cache.pool import empty_layer
from kvjax.cache.quantisation import Storage
from kvjax.policies import H2O, TOVA, AhaKV
from kvjax.policies.evicting import attention_weights, lowest_slot
from kvjax.runtime.compilation import compile_clock
from pallas_kernels.softmax import NEG

POLICIES = [H2O(budget=24), AhaKV(budget=24, recent=8), TOVA(budget=24)]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)


@pytest.mark.slow
@each_policy
def test_a_budget_that_covers_everything_is_the_full_cache(policy, tiny_model):
    ample = dataclasses.replace(policy, budget=200)
    prompts = ["a", "a somewhat longer prompt, of more than one page of tokens"]
    options = dict(max_new_tokens=20, stop_token_ids=(), logprobs=True)
    whole, evicted = (kvjax.generate(tiny_model, prompts, policy=p, **options) for p in (None, ample))
    for a, b in zip(whole, evicted, strict=True):
        assert a.tokens == b.tokens and a.stats.retained == b.stats.retained
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@each_policy
def test_a_row_of_a_batch_is_the_row_alone(policy, tiny_model):
    prompts = ["shorter than the budget", "a prompt that is well over the budget of a head, so that it is cut"]
    options = dict(policy=policy, max_new_tokens=40, stop_token_ids=())
    together = kvjax.generate(tiny_model, prompts, **options)
    for prompt, row in zip(prompts, together, strict=True):
        assert row.tokens == kvjax.generate(tiny_model, prompt, **options).tokens


@each_policy
def test_decoding_far_beyond_the_budget_neither_compiles_nor_grows(policy, tiny_model):
    options = dict(policy=policy, stop_token_ids=())
    first = kvjax.generate(tiny_model, "warm the programs", max_new_tokens=3 * policy.budget, **options)
    with compile_clock() as clock:
        again = kvjax.generate(tiny_model, "and once more ...", max_new_tokens=3 * policy.budget, **options)
    assert clock.programs == 0
    assert first.cache.nbytes == again.cache.nbytes
    for layer in again.cache.layers:
        assert layer.slots == (32, 32)
        assert (np.asarray(policy.retained(layer)) == policy.budget).all()


@each_policy
def test_no_more_is_allocated_than_the_context_can_fill(policy):
    config = dataclasses.replace(layer_config(2, 2, 8), max_position=100)
    ample = dataclasses.replace(policy, budget=2048)
    assert ample.capacities(config, 64, 256)[0] == (101, 101)


@each_policy
def test_rows_that_are_done_stay_bit_for_bit(policy):
    q, k, v = random_qkv(3, 2, 2, 2, 100, 8)
    evictor = Evictor(policy, layer_config(2, 2, 8), 2, ROOM)
    evictor.turn(q[..., :40, :], k[..., :40, :], v[..., :40, :], [40, 20])
    active = np.ones((60, 2), bool)
    active[7:, 1] = False
    evictor.steps(q[..., 40:47, :], k[..., 40:47, :], v[..., 40:47, :], active[:7])
    before = jax.tree.map(lambda x: np.asarray(x[1]), evictor.cache)
    evictor.steps(q[..., 47:, :], k[..., 47:, :], v[..., 47:, :], active[7:])
    after = jax.tree.map(lambda x: np.asarray(x[1]), evictor.cache)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    assert evictor.seen.tolist() == [100, 27]


@each_policy
def test_a_row_that_reads_nothing_in_a_turn_goes_on_as_if_there_had_been_none(policy):
    q, k, v = random_qkv(4, 2, 2, 2, 110, 8)

    def part(start, end):
        return q[..., start:end, :], k[..., start:end, :], v[..., start:end, :]

    kept = []
    for turn in (True, False):
        evictor = Evictor(policy, layer_config(2, 2, 8), 2, ROOM).turn(*part(0, 50), [50, 30]).steps(*part(50, 60))
        if turn:
            evictor.turn(*part(60, 80), [20, 0])
        kept.append(evictor.steps(*part(80, 110)).kept(k, 1))
    assert kept[0] == kept[1]


@each_policy
def test_int8_rows_evict_like_float_rows_almost_always(policy):
    q, k, v = random_qkv(5, 1, 2, 2, 96, 16)
    held = []
    for storage in (Storage(), Storage("int8")):
        evictor = Evictor(policy, layer_config(2, 2, 16), 1, ROOM, storage=storage)
        evictor.turn(q[..., :64, :], k[..., :64, :], v[..., :64, :], 64)
        evictor.steps(q[..., 64:, :], k[..., 64:, :], v[..., 64:, :])
        cache, live = evictor.cache, []
        for head in range(2):
            slots = [s for s in range(int(cache.length[0, head])) if s != int(cache.next[0, head])]
            position = np.asarray(cache.marks["position"][0, head]).ravel()
            live.append({int(position[s]) for s in slots})
        held.append(live)
    for real, quantised in zip(*held, strict=True):
        assert len(real) == len(quantised) == policy.budget
        assert len(real & quantised) >= 0.85 * policy.budget


@pytest.mark.parametrize("sink", [None, 0.0, 30.0], ids=["plain", "a sink", "a high sink"])
@pytest.mark.parametrize(
    "pages", [((2, 2), (2, 2)), ((1, 3), (1, 3)), ((2, 2), (1, 3))], ids=["uniform", "ragged", "by row"]
)
def test_weights_and_the_lowest_slot_are_those_of_each_head_alone(pages, sink):
    rng = np.random.default_rng(0)
    length = np.array([[20, 60], [32, 33]])
    by_row = pages[0] != pages[1]
    cache = empty_layer(2, pages[0], 4, jnp.float32, marks=("position", "score"), by_row=by_row)
    if by_row:
        cache = cache.replace(row_starts=jnp.asarray([[0, own[0]] for own in pages], jnp.int32))
    positions = rng.permuted(np.tile(np.arange(128), (2, 1)), axis=1).reshape(2, 4, 32).astype(np.int32)
    cache = cache.replace(length=jnp.asarray(length), marks={**cache.marks, "position": jnp.asarray(positions)})
    runs = [[slice(0, own[0]), slice(own[0], 4)] for own in pages]
    logits = rng.standard_normal((2, 4, 3, 32)).astype(np.float32)
    score = rng.integers(0, 4, (2, 4, 32)).astype(np.float32)  # many ties
    among = rng.random((2, 4, 32)) < 0.7
    gain = np.array([0.5, 2.0], np.float32)
    for row, head in np.ndindex(2, 2):
        beyond = (np.arange(32 * pages[row][head]) >= length[row, head]).reshape(-1, 32)
        logits[row, runs[row][head]] = np.where(beyond[:, None], NEG, logits[row, runs[row][head]])
    sinks = None if sink is None else sink + rng.standard_normal((2, 2, 3)).astype(np.float32)
    given = None if sinks is None else jnp.asarray(sinks)
    weights = np.asarray(attention_weights(cache, jnp.asarray(logits), jnp.asarray(gain), given))
    lowest = np.asarray(lowest_slot(cache, jnp.asarray(score), jnp.asarray(among)))
    for row, head in np.ndindex(2, 2):
        held = length[row, head]
        own = logits[row, runs[row][head]].transpose(1, 0, 2).reshape(3, -1).astype(np.float64)[:, :held]
        expected = np.exp(gain[row] * own)
        beside = 0 if sinks is None else np.exp(gain[row] * sinks[row, head].astype(np.float64))[:, None]
        expected /= expected.sum(axis=1, keepdims=True) + beside
        got = weights[row, runs[row][head]].transpose(1, 0, 2).reshape(3, -1)
        np.testing.assert_allclose(got[:, :held], expected, rtol=1e-5 if sink else 2e-6)
        assert (got[:, held:] == 0).all()
        own_score, own_among, own_position = (x[row, runs[row][head]].ravel()[:held] for x in (score, among, positions))
        allowed = [s for s in range(held) if own_among[s]]
        assert lowest[row, head] == min(allowed, key=lambda s: (own_score[s], own_position[s]))


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=pytest.mark.slow) for p in POLICIES[:2]],
    ids=lambda policy: type(policy).__name__,
)
def test_real_model_retrieves_from_an_evicted_cache(policy, default_model):
    """Real keys have outlier channels and attention sinks; what is left must still make sentences."""
    policy = dataclasses.replace(policy, budget=96)
    text = "The capital of France is Paris. " * 12 + "Which city is the capital of France? Answer in one word."
    output = kvjax.generate(default_model, [{"role": "user", "content": text}], policy=policy, max_new_tokens=12)
    assert "Paris" in output.text
    assert output.stats.seen > 96 and all(set(heads) == {96} for heads in output.stats.retained)
