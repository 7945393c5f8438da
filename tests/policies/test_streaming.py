"""StreamingLLM: which tokens a ring holds, and that renumbering positions is what the paper does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.driver import Driver, config_for, random_kv

from kvjax.cache.pool import keys_and_values
from kvjax.errors import UsageError
from kvjax.model.rope import angles, rotate
from kvjax.policies import StreamingLLM


def expected(seen: int, sink: int, window: int) -> list[int]:
    """The paper's cache: the first ``sink`` tokens and the last ``window``."""
    return sorted({*range(min(sink, seen)), *range(max(seen - window, 0), seen)})


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    sink=st.sampled_from([0, 1, 4]),
    turns=st.lists(st.integers(0, 40), max_size=2),
)
def test_sinks_and_recent_tokens_stay_through_prompts_decoding_and_turns(lengths, sink, turns):
    window, decoded = 11, 32
    policy = StreamingLLM(sink=sink, window=window)
    k, v = random_kv(0, 2, 2, 300, 4)
    driver = Driver(policy, config_for(2, 4), 2, prompt_capacity=64, new_capacity=decoded)
    own: list[list[int]] = [[], []]
    at = 0
    for count in (np.array(lengths), *(np.array([n, max(n - 3, 0)]) for n in turns)):
        size = int(count.max())
        driver.read(k[:, :, at : at + size], v[:, :, at : at + size], count)
        for row in range(2):
            own[row] += range(at, at + count[row])
        at += size
        driver.decode(k[:, :, at : at + decoded], v[:, :, at : at + decoded])
        for row in range(2):
            own[row] += range(at, at + decoded)
        at += decoded
        for row in range(2):
            want = [own[row][i] for i in expected(len(own[row]), sink, window)]
            assert [sorted(head) for head in driver.kept(k, row)] == [want, want]


@pytest.mark.parametrize("ratio, length, kept", [(0.25, 400, 100), (0.3, 10, 5), (1.0, 64, 64), (0.5, 3, 3)])
def test_ratio_is_a_share_of_the_prompt_and_at_least_the_sinks_and_one(ratio, length, kept):
    policy, config = StreamingLLM(sink=4, ratio=ratio), config_for(1, 4)
    k, v = random_kv(1, 1, 1, length, 4)
    driver = Driver(policy, config, 1, prompt_capacity=448, new_capacity=8).read(k, v, length)
    assert int(driver.cache.length[0, 0]) == kept == int(policy.budgets(config, 0, np.array([length]))[0, 0])
    driver.decode(*random_kv(2, 1, 1, 40, 4))
    assert int(driver.cache.length[0, 0]) == max(kept, int(policy._budget(np.array(length))))


def test_a_row_that_is_done_keeps_its_ring():
    k, v = random_kv(2, 2, 1, 80, 4)
    driver = Driver(StreamingLLM(sink=2, window=8), config_for(1, 4), 2, prompt_capacity=64, new_capacity=8)
    driver.read(k[:, :, :30], v[:, :, :30], [30, 20])
    active = np.zeros((50, 2), bool)
    active[:, 0] = True
    driver.decode(k[:, :, 30:], v[:, :, 30:], active)
    assert sorted(driver.kept(k, 1)[0]) == expected(20, 2, 8)
    assert sorted(driver.kept(k, 0)[0]) == expected(80, 2, 8)


def test_cache_positions_score_as_if_tokens_were_numbered_by_their_slot():
    """The paper's definition: apply rotary embedding to the keys by their place in the cache, the query by its own."""
    sink, window, seen = 3, 9, 70
    config = config_for(1, 8)
    rng = np.random.default_rng(0)
    raw_k = rng.standard_normal((1, 1, seen, 8)).astype(np.float32)
    raw_q = rng.standard_normal((1, 8)).astype(np.float32)
    position = np.arange(seen)[None]
    cos, sin = angles(config, jnp.asarray(position), jnp.asarray([seen]))
    k = np.asarray(rotate(jnp.asarray(raw_k), cos[:, None], sin[:, None]))
    v = rng.standard_normal(k.shape).astype(np.float32)
    policy = StreamingLLM(sink=sink, window=window, positions="cache")
    driver = Driver(policy, config, 1, prompt_capacity=64, new_capacity=8).read(k[:, :, :20], v[:, :, :20], 20)
    driver.decode(k[:, :, 20:], v[:, :, 20:])
    stored, stored_v = (np.asarray(x)[0, 0, : sink + window] for x in keys_and_values(driver.cache))
    # The product: the query at its original position against the stored keys.
    q_cos, q_sin = angles(config, jnp.asarray([[seen - 1]]), jnp.asarray([seen]))
    scores = stored @ np.asarray(rotate(jnp.asarray(raw_q)[None], q_cos, q_sin))[0, 0]
    # The paper: everything numbered by slot, oldest first.
    kept = expected(seen, sink, window)
    slots = np.arange(len(kept))[None]
    s_cos, s_sin = angles(config, jnp.asarray(slots), jnp.asarray([seen]))
    keys = np.asarray(rotate(jnp.asarray(raw_k[0, 0, kept])[None], s_cos, s_sin))[0]
    query = np.asarray(rotate(jnp.asarray(raw_q)[None], s_cos[:, -1:], s_sin[:, -1:]))[0, 0]
    by_token = {v[0, 0, t].tobytes(): score for t, score in zip(kept, keys @ query, strict=True)}
    wanted = [by_token[row.tobytes()] for row in stored_v]
    np.testing.assert_allclose(scores, wanted, atol=2e-5)


def test_before_anything_leaves_both_positions_store_the_same():
    k, v = random_kv(3, 1, 2, 20, 8)
    config = config_for(2, 8)
    stored = [
        np.asarray(
            Driver(StreamingLLM(sink=2, window=30, positions=p), config, 1, prompt_capacity=64, new_capacity=8)
            .read(k, v, 20)
            .cache.kv.k
        )
        for p in ("original", "cache")
    ]
    assert (stored[0] == stored[1]).all()


def test_moving_frequencies_cannot_be_renumbered():
    from kvjax.model.config import RopeConfig

    config = config_for(1, 8, rope=RopeConfig(kind="dynamic", factor=2.0))
    with pytest.raises(UsageError, match="dynamic"):
        StreamingLLM(positions="cache").check(config)
    StreamingLLM().check(config)


@pytest.mark.parametrize(
    "bad", [dict(sink=-1), dict(window=0), dict(budget=4), dict(ratio=2), dict(window=5, ratio=0.5),
            dict(positions="slots"), dict(sink=1.5)],
)  # fmt: skip
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        StreamingLLM(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_budget_smaller_than_sinks_and_window_says_what_is_accepted():
    with pytest.raises(UsageError, match="at least 5"):
        StreamingLLM(sink=4, budget=3)


def test_decoding_far_beyond_the_budget_never_grows_the_pool():
    policy = StreamingLLM(sink=2, window=14)
    driver = Driver(policy, config_for(1, 4), 1, prompt_capacity=64, new_capacity=4)
    shapes = jax.tree.map(jnp.shape, driver.cache)
    k, v = random_kv(4, 1, 1, 10 + 16 * 32, 4)
    driver.read(k[:, :, :10], v[:, :, :10], 10).decode(k[:, :, 10:], v[:, :, 10:])
    assert jax.tree.map(jnp.shape, driver.cache) == shapes
    assert sorted(driver.kept(k)[0]) == expected(k.shape[2], 2, 14)
