"""Compactor against its equations in NumPy: leverage by inverse, attention chunk by chunk, and what they keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.test_expected_attention import rotation
from support.choosing import Lane, assert_alone, best, pooled, softmax
from support.driver import config_for

from kvjax.cache.page_sharding import UNSHARDED, PageSharding
from kvjax.cache.pool import LayerCache
from kvjax.errors import UsageError
from kvjax.model.config import RopeConfig
from kvjax.policies import Compactor, PromptChunk
from kvjax.policies.base import Candidates
from kvjax.policies.compactor import before_rope, leverages, standardised

BUDGET, SINK, RECENT, CHUNK = 12, 2, 3, 8
PLAIN = {"budget": BUDGET, "sink": SINK, "recent": RECENT, "chunk": CHUNK, "sketch": 0}


class CompactorLayer:
    """The KV heads of a layer, whose scores are relative to one another's: float64, tokens by number, no JAX."""

    def __init__(self, q, k, v, blend=0.5, onto=None, rotary=True, scaled=False):
        self.q, self.k, self.v = (x.astype(np.float64) for x in (q, k, v))  # [H, G, T, D], [H, T, D], [H, T, D]
        self.blend, self.onto, self.rotary = blend, onto, rotary
        self.scale = k.shape[-1] ** -0.5 if scaled else 1.0
        self.kept: list[list[int]] = [[] for _ in k]
        self.attention: list[dict[int, float]] = [{} for _ in k]
        self.seen = 0

    def decode(self, count):
        new = list(range(self.seen, self.seen + count))
        self.kept, self.seen = [kept + new for kept in self.kept], self.seen + count

    def read(self, count):
        new = list(range(self.seen, self.seen + count))
        self.note([t for t in new[: max(len(new) - RECENT, 0)] if t >= SINK])
        self.decode(count)
        if new and len(self.kept[0]) > BUDGET:
            self.choose()

    def note(self, inside):
        for start in range(0, len(inside), CHUNK):
            part = inside[start : start + CHUNK]
            for head, (k, group) in enumerate(zip(self.k, self.q, strict=True)):
                weights = [[softmax(k[part] @ q[t] * self.scale) for t in part] for q in group]
                masses = np.sum(weights, axis=1).mean(axis=0)
                lacking = (CHUNK - len(part)) / CHUNK
                self.attention[head] |= dict(zip(part, masses + lacking, strict=True))

    def choose(self):
        free = [kept[SINK:-RECENT] for kept in self.kept]
        leverages = [self.leverages(head, tokens) for head, tokens in enumerate(free)]
        masses = [self.masses(head, tokens) for head, tokens in enumerate(free)]
        blend = 1 - BUDGET / self.seen if self.blend is None else self.blend
        scores = blend * standard(leverages) + standard(masses)
        for head, tokens in enumerate(free):
            ends = self.kept[head][:SINK] + self.kept[head][-RECENT:]
            self.kept[head] = sorted(ends + [tokens[i] for i in best(scores[head], BUDGET - len(ends))])

    def leverages(self, head, tokens):
        k, dim = self.k[head], self.k.shape[-1]
        keys = np.stack([rotation(t, dim).T @ k[t] if self.rotary else k[t] for t in tokens])
        x = keys - keys.mean(axis=0)
        x = x if self.onto is None else x @ self.onto[head]
        gram = x.T @ x
        ridge = 1e-2 + 1e-6 * np.trace(gram) / len(gram)
        return np.einsum("nd,de,ne->n", x, np.linalg.inv(gram + ridge * np.eye(len(gram))), x)

    def masses(self, head, tokens):
        return pooled([self.attention[head].get(t, 1.0) * np.linalg.norm(self.v[head][t]) for t in tokens], 3, "avg")


def standard(x) -> np.ndarray:
    x = np.array(x)
    return (x - x.mean()) / max(x.std(), 1e-6)


def assert_same(policy, events, *, heads, group, dim=4, seed=0, positional="rope", **options) -> None:
    """Compactor keeps the tokens that its equations keep, in every row and head."""
    batch = len(next(amount for kind, amount in events if kind == "read"))
    tokens = sum(int(max(amount)) if kind == "read" else amount for kind, amount in events)
    lane = Lane(policy, batch, heads, group, dim, tokens, seed, positional=positional).play(events)
    for row in range(batch):
        oracle = CompactorLayer(lane.q[row], lane.k[row], lane.v[row], rotary=positional == "rope", **options)
        for kind, amount in events:
            oracle.read(int(amount[row])) if kind == "read" else oracle.decode(amount)
        assert lane.driver.kept(lane.k, row) == oracle.kept, row


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 2), (1, 4)], ids=["mha", "gqa", "mqa"])
def test_choices_are_the_equations_around_every_boundary(heads, group):
    lengths = [1, SINK + RECENT, BUDGET, BUDGET + 1, SINK + CHUNK + RECENT, 70]
    assert_same(Compactor(**PLAIN, blend=0.5), [("read", lengths)], heads=heads, group=group)


def test_the_blend_is_the_share_that_leaves_when_not_given():
    assert_same(Compactor(**PLAIN), [("read", [70, 30])], heads=2, group=2, blend=None)


def test_logits_may_be_scaled():
    policy = Compactor(**PLAIN, blend=0.5, scaled=True)
    assert_same(policy, [("read", [70, 30])], heads=2, group=2, dim=8, scaled=True)


def test_keys_of_each_head_are_projected():
    heads = [jax.random.fold_in(jax.random.key(5), head) for head in range(2)]
    onto = [np.asarray(jax.random.normal(key, (8, 3)), np.float64) / np.sqrt(3) for key in heads]
    policy = Compactor(**PLAIN | {"sketch": 3}, seed=5, blend=0.5)
    assert_same(policy, [("read", [70, 30])], heads=2, group=2, dim=8, onto=onto)


def test_later_turns_keep_the_attention_that_was_read_and_give_decoded_tokens_the_average():
    events = [("read", [30, 14, 5]), ("decode", 7), ("read", [9, 2, 0]), ("decode", 3), ("read", [1, 40, 20])]
    assert_same(Compactor(**PLAIN, blend=0.5), events, heads=2, group=2, seed=5)


def test_with_alibi_keys_are_as_they_are():
    assert_same(Compactor(**PLAIN, blend=0.5), [("read", [40, 20])], heads=1, group=2, positional="alibi")


@pytest.mark.slow
def test_a_row_equals_the_row_alone():
    assert_alone(Compactor(**PLAIN), [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), seed=st.integers(0, 10**6))
def test_any_lengths(lengths, seed):
    assert_same(Compactor(**PLAIN, blend=0.5), [("read", lengths)], heads=2, group=2, seed=seed)


def test_leverages_are_those_of_the_hat_matrix_and_sum_to_the_rank():
    keys = np.random.default_rng(0).standard_normal((1, 200, 6)).astype(np.float32) * 30
    counted = jnp.arange(200)[None] < 150
    found = np.asarray(leverages(jnp.asarray(keys), counted, None))[0]
    centred = keys[0, :150] - keys[0, :150].mean(axis=0)
    np.testing.assert_allclose(found[:150], np.diag(centred @ np.linalg.pinv(centred)), atol=1e-3)
    assert abs(found[:150].sum() - 6) < 1e-2 and (found[150:] == 0).all()


def test_devices_that_have_some_of_the_heads_find_what_one_device_finds():
    rng = np.random.default_rng(0)
    k, counted = rng.standard_normal((2, 4, 30, 8)).astype(np.float32), rng.random((2, 4, 30)) < 0.8
    two = jnp.full((2,), 30, jnp.int32)
    chunk = PromptChunk(two, two, two, pages=(1,), config=config_for(4, 8, positional="alibi"), fresh=True)

    def found(k, counted, sharding):
        cache, candidates = LayerCache.__new__(LayerCache), Candidates.__new__(Candidates)  # of what is read alone
        object.__setattr__(cache, "sharding", sharding)
        object.__setattr__(candidates, "k", k)
        leverage = Compactor(sketch=3)._leverages(cache, candidates, chunk, counted)
        return standardised(leverage, counted, sharding)

    whole = found(jnp.asarray(k), jnp.asarray(counted), UNSHARDED)
    halves = [jnp.stack([x[:, :2], x[:, 2:]]) for x in (jnp.asarray(k), jnp.asarray(counted))]
    sharding = PageSharding(head_axes=("model",), head_parts=2)
    apart = jax.vmap(lambda k, counted: found(k, counted, sharding), axis_name="model")(*halves)
    np.testing.assert_allclose(jnp.concatenate(list(apart), axis=1), whole, atol=1e-5)


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
