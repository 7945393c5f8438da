"""AhaKV against the paper's equations in NumPy, token by token, and the properties it claims."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.eviction_oracle import NARROW, HeadOracle, RowOracle, attention, sizes, softmax
from support.evictor import Evictor, compare, layer_config, random_qkv

from kvjax.cache.packing import store
from kvjax.cache.pool import by_head, by_page
from kvjax.errors import UsageError
from kvjax.model.alibi import slopes
from kvjax.policies import H2O, AhaKV, Step
from pallas_kernels.softmax import NEG

# --- the oracle: equations [5], [9], [12]-[15] and Algorithm 1 -------------------------------------------------------


def step_gain(total: int, budget: int, dim: int) -> float:
    """[12]; a row that fits its budget has none, and keeps the model's own scale."""
    return float(np.sqrt(2 * np.log(total / budget) / dim)) if total > budget else dim**-0.5


def prior(v: np.ndarray, kernel: int) -> np.ndarray:
    """[13, 14]: the mean of |v|^2 over what a centred window finds, over its largest."""
    norms, half = (v.astype(np.float64) ** 2).sum(axis=1), kernel // 2
    mean = np.array([norms[max(i - half, 0) : i + half + 1].mean() for i in range(len(norms))])
    return mean / mean.max()


def oracle_of(policy: AhaKV):
    def start(oracle: HeadOracle, candidates: list[int], new: list[int]) -> tuple[dict, dict]:
        queries = new[-policy.recent :] if policy.recent_accumulation else new
        scores = attention(oracle.q, oracle.k, queries, candidates, oracle.factor).sum(axis=(0, 1))
        if policy.value_prior:
            scores = scores * prior(oracle.v[candidates], policy.kernel)
        before = {} if policy.recent_accumulation else oracle.scores
        result = {t: before.get(t, 0.0) + score for t, score in zip(candidates, scores, strict=True)}
        return result, result

    def make(q, k, v):
        dim = q.shape[-1]
        scale = (lambda i, k: step_gain(i, k, dim)) if policy.step_gain else (lambda i, k: dim**-0.5)
        recent = lambda budget: policy.recent  # noqa: E731
        return RowOracle([HeadOracle(*x, sizes(policy), recent, start, scale) for x in zip(q, k, v, strict=True)])

    return make


SWITCHES = [{}] + [{name: False} for name in ("recent_accumulation", "step_gain", "value_prior")]
OFF = dict(recent_accumulation=False, step_gain=False, value_prior=False)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 3), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_prompt_and_every_step_keep_what_the_equations_keep(heads, group):
    budget = 12
    policy = AhaKV(budget=budget, recent=4)
    lengths = [1, budget - 1, budget, budget + 1, 40]
    events = [("steps", 1), ("steps", 1), ("steps", 30)]
    margin = compare(policy, oracle_of(policy), lengths, events, seed=1, heads=heads, group=group, spread=1.0)
    assert margin > NARROW


@pytest.mark.slow
@pytest.mark.parametrize("switches", [*SWITCHES, OFF], ids=lambda s: ",".join(s) or "all on")
def test_each_part_can_be_switched_off(switches):
    policy = AhaKV(ratio=0.3, recent=5, **switches)
    events = [("steps", 12), ("turn", 3), ("steps", 4), ("turn", 25), ("steps", 12)]
    assert compare(policy, oracle_of(policy), [50, 33], events, seed=2, spread=1.0) > NARROW


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    policy=st.sampled_from([AhaKV(ratio=0.25, recent=6), AhaKV(budget=9, recent=1, kernel=1)]),
    seed=st.integers(0, 10**6),
)
def test_any_lengths_sizes_and_windows(lengths, policy, seed):
    assume(compare(policy, oracle_of(policy), lengths, [("steps", 20)], seed=seed, spread=1.0) > NARROW)


def mean_entropy(scale: float, tokens: int, dim: int) -> float:
    rng = np.random.default_rng(0)
    weights = softmax(scale * rng.standard_normal((200, dim)) @ rng.standard_normal((dim, tokens)))
    return float(-(weights * np.log(weights)).sum(axis=1).mean())


def test_step_gain_on_raw_products_has_the_entropy_of_the_budget():
    """[11]: the entropy is to be log k. Algorithm 1's extra 1 / sqrt(d) would leave it near log i."""
    config = layer_config(1, 1, 64)
    scale = float(AhaKV(budget=512).window_scale(config, jnp.array([4096]))[0])
    assert scale == pytest.approx(np.sqrt(2 * np.log(4096 / 512) / 64), rel=1e-6)
    assert mean_entropy(scale, 4096, 64) == pytest.approx(np.log(512), abs=0.12)
    assert mean_entropy(scale / 8, 4096, 64) > np.log(512) + 2


def retained_share_of_first_half(policy) -> float:
    """Of the tokens kept outside the recent window, the share that stands in the first half, over 16 heads."""
    tokens, heads = 512, 16
    q, k, v = random_qkv(7, 1, heads, 2, tokens, 16, spread=1.0)
    evictor = Evictor(policy, layer_config(heads, 2, 16), 1, prompt_capacity=tokens).turn(q, k, v, tokens)
    last = tokens - policy.recent
    return float(np.mean([t < last / 2 for head in evictor.kept(k) for t in head if t < last]))


def test_positions_kept_of_random_keys_are_uniform_where_accumulated_attention_prefers_the_first():
    assert retained_share_of_first_half(AhaKV(budget=80, recent=16)) == pytest.approx(0.5, abs=0.06)
    assert retained_share_of_first_half(H2O(budget=80, recent=16)) > 0.85


def test_lambda_is_finite_for_rows_of_every_length():
    policy, config = AhaKV(budget=100), layer_config(1, 1, 16)
    scale = np.asarray(policy.window_scale(config, jnp.array([1, 99, 100, 101, 10**6])))
    assert (scale[:3] == np.float32(0.25)).all()
    np.testing.assert_allclose(scale[3:], [step_gain(101, 100, 16), step_gain(10**6, 100, 16)], rtol=1e-4)
    plain = dataclasses.replace(policy, step_gain=False).window_scale(config, jnp.array([10**4]))
    assert float(plain[0]) == 0.25


def test_values_that_are_all_zero_leave_the_scores_as_they_are():
    q, k, v = random_qkv(8, 1, 1, 2, 40, 8)
    kept = [
        Evictor(policy, layer_config(1, 2, 8), 1, prompt_capacity=64).turn(q, k, 0 * v, 40).kept(k)
        for policy in (AhaKV(budget=10, recent=4), AhaKV(budget=10, recent=4, value_prior=False))
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    "bad", [dict(recent=0), dict(recent=1.5), dict(kernel=0), dict(kernel=4), dict(step_gain=1),
            dict(value_prior="yes"), dict(budget=32), dict(budget=10, recent=10), dict(ratio=0), dict(ratio=1.5),
            dict(budget=64, ratio=0.5)],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        AhaKV(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_step_gain_leaves_alibis_bias_as_it_is():
    config = toys.tiny_config(positional="alibi", norm="layer", mlp="gelu", embedding_norm=True)
    rng = np.random.default_rng(5)
    policy = AhaKV(budget=40)
    cache = policy.init_layer(config, 0, 1, (2, 2), jnp.float32)
    position = jnp.asarray(rng.permutation(64)[None, None].repeat(2, axis=1), jnp.int32)
    rows = jnp.zeros((1, 2, 64, 8))
    cache = store(cache, rows, rows, jnp.full((1, 2), 50), (2, 2), {"position": position})
    cache = cache.replace(state=dataclasses.replace(cache.state, own=jnp.asarray([1.7])))
    scaled = rng.standard_normal((1, 2, 2, 64))
    bias = np.asarray(slopes(config))[None, :, :, None] * (np.asarray(position)[:, :, None] - 70)
    held = np.arange(64) < 50
    logits = by_page(cache, jnp.asarray(np.where(held, scaled + bias, NEG), jnp.float32))
    step = Step(jnp.asarray([70]), jnp.asarray([True]), config=config)
    got = by_head(cache, policy.gains(cache, logits, step))
    wanted = np.where(held, np.exp(1.7 * scaled + bias), 0)
    wanted = (wanted / wanted.sum(axis=-1, keepdims=True)).sum(axis=2)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
