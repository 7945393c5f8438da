"""Compactor against its equations in NumPy: leverage by inverse, attention chunk by chunk, and what they keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_expected_attention import rotation
from support.choosing import ChoosingHead, Lane, assert_alone, assert_same, best, pooled, softmax
from support.driver import config_for

from kvjax.errors import UsageError
from kvjax.model.config import RopeConfig
from kvjax.policies import Compactor, PromptChunk
from kvjax.policies.compactor import before_rope, leverages

BUDGET, SINK, RECENT, CHUNK = 12, 2, 3, 8
PLAIN = {"budget": BUDGET, "sink": SINK, "recent": RECENT, "chunk": CHUNK, "sketch": 0}


class CompactorHead(ChoosingHead):
    def __init__(self, *args, blend=0.5, sketch=None, rotary=True, scaled=True, **place):
        super().__init__(*args, **place)
        self.blend, self.sketch, self.rotary = blend, sketch, rotary
        self.scale = self.k.shape[1] ** -0.5 if scaled else 1.0
        self.attention: dict[int, float] = {}

    def budget(self, total: int) -> int:
        return BUDGET

    def noted(self, new):
        inside = [t for t in new[: len(new) - RECENT] if t >= SINK]
        for start in range(0, len(inside), CHUNK):
            part = inside[start : start + CHUNK]
            for queries in self.q:
                weights = [softmax(self.k[part] @ queries[t] * self.scale) for t in part]
                for t, mass in zip(part, np.sum(weights, axis=0), strict=True):
                    self.attention[t] = self.attention.get(t, 0) + mass / len(self.q)

    def choose(self, candidates, new, budget):
        ends, free = candidates[:SINK] + candidates[-RECENT:], candidates[SINK:-RECENT]
        keys = np.stack([rotation(t, self.k.shape[1]).T @ self.k[t] if self.rotary else self.k[t] for t in free])
        x = keys - keys.mean(axis=0)
        x = x if self.sketch is None else x @ self.sketch
        gram = x.T @ x
        ridge = 1e-2 + 1e-6 * np.trace(gram) / len(gram)
        leverage = np.einsum("nd,de,ne->n", x, np.linalg.inv(gram + ridge * np.eye(len(gram))), x)
        mass = [self.attention.get(t, 1.0) * np.linalg.norm(self.v[t]) for t in free]
        attention = pooled(mass, 3, "avg")
        blend = 1 - budget / self.seen if self.blend is None else self.blend
        scores = blend * standard(leverage) + standard(attention)
        return sorted(ends + [free[i] for i in best(scores, budget - len(ends))])


def standard(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / max(x.std(), 1e-6)


def head_of(**options):
    return lambda *args, **place: CompactorHead(*args, **options, **place)


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_equations_around_every_boundary(heads, group):
    lengths = [1, SINK + RECENT, BUDGET, BUDGET + 1, SINK + CHUNK + RECENT, 70]
    assert_same(Compactor(**PLAIN, blend=0.5), head_of(), [("read", lengths)], heads=heads, group=group)


def test_the_blend_is_the_share_that_leaves_when_not_given():
    assert_same(Compactor(**PLAIN), head_of(blend=None), [("read", [70, 30])], heads=2, group=2)


def test_logits_may_be_left_unscaled():
    policy = Compactor(**PLAIN, blend=0.5, scaled=False)
    assert_same(policy, head_of(scaled=False), [("read", [70, 30])], heads=2, group=2, dim=8)


def test_keys_are_projected():
    onto = np.asarray(jax.random.normal(jax.random.key(5), (8, 3)), np.float64) / np.sqrt(3)
    policy = Compactor(**PLAIN | {"sketch": 3}, seed=5, blend=0.5)
    assert_same(policy, head_of(sketch=onto), [("read", [70, 30])], heads=2, group=2, dim=8)


def test_later_turns_keep_the_attention_that_was_read_and_give_decoded_tokens_the_average():
    events = [("read", [30, 14, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(Compactor(**PLAIN, blend=0.5), head_of(), events, heads=2, group=2, seed=5)


def test_with_alibi_keys_are_as_they_are():
    policy, head = Compactor(**PLAIN, blend=0.5), head_of(rotary=False)
    assert_same(policy, head, [("read", [40, 20])], heads=1, group=2, positional="alibi")


@pytest.mark.slow
def test_a_row_equals_the_row_alone():
    assert_alone(Compactor(**PLAIN), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(Compactor(**PLAIN, blend=0.5), head_of(), [("read", lengths)], heads=1, group=2, seed=seed)


def test_leverages_are_those_of_the_hat_matrix_and_sum_to_the_rank():
    keys = np.random.default_rng(0).standard_normal((1, 200, 6)).astype(np.float32) * 30
    counted = jnp.arange(200)[None] < 150
    found = np.asarray(leverages(jnp.asarray(keys), counted, 0, 0))[0]
    centred = keys[0, :150] - keys[0, :150].mean(axis=0)
    np.testing.assert_allclose(found[:150], np.diag(centred @ np.linalg.pinv(centred)), atol=1e-3)
    assert abs(found[:150].sum() - 6) < 1e-2 and (found[150:] == 0).all()


def test_equal_keys_and_silent_values_are_no_trouble():
    lane = Lane(Compactor(**PLAIN), 1, 1, 1, 4, 40, seed=3)
    lane.v[:] = 0
    lane.k[:] = lane.k[:, :, :1] * (1 + 1e-6 * np.arange(40, dtype=np.float32)[:, None])
    lane.play([("read", [40])])
    assert int(lane.driver.cache.length[0, 0]) == BUDGET


def test_yarns_temperature_is_taken_from_the_keys():
    rope = RopeConfig(kind="yarn", factor=1.0, original_max_position=512, attention_factor=1.5)
    config = config_for(1, 8, rope=rope)
    raw = np.random.default_rng(0).standard_normal((1, 9, 8)).astype(np.float32)
    after_rope = np.stack([rotation(5 + t, 8, 1.5) @ raw[0, t] for t in range(9)])[None].astype(np.float32)
    nine = jnp.full((1,), 9, jnp.int32)
    chunk = PromptChunk(nine - 4, nine, nine + 5, pages=(1,), config=config, fresh=True)
    position = 5 + jnp.arange(9, dtype=jnp.int32)[None]
    np.testing.assert_allclose(before_rope(jnp.asarray(after_rope), position, chunk), raw, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [dict(sink=-1), dict(recent=1.5), dict(chunk=1), dict(sketch=-1), dict(blend=-1), dict(seed=-1), dict(budget=12)],
)
def test_bad_parameters_are_one_sentence(bad):
    with pytest.raises(UsageError) as error:
        Compactor(**bad)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
