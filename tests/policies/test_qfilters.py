"""Q-Filters: the choice by a product with each head's filter, and the filters that calibration finds."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from support.choosing import ChoosingHead, assert_alone, assert_same, best
from support.driver import config_for
from support.filters import random_filters

import kvjax
from kvjax.calibrate import load_profile, query_filters, save_profile
from kvjax.calibrate.filters import filters_of
from kvjax.errors import UsageError
from kvjax.model.rope import angles, rotate
from kvjax.policies import ChunkKV, QFilters
from kvjax.policies.profile_files import packaged

BUDGET = 12
TEXT = "The harbour was built in 1886. Its light is green, and its keeper grew roses until the war began. "


class FilterHead(ChoosingHead):
    filters = None

    def budget(self, total: int) -> int:
        return BUDGET

    def choose(self, candidates, new, budget):
        kept = best(self.k[candidates] @ self.filters[self.head], budget)
        return [candidates[i] for i in kept]


def head_of(profile, layer, dim):
    filters = np.array(profile.filters[layer]).reshape(-1, dim)
    return type("Head", (FilterHead,), {"filters": filters})


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (1, 4)], ids=["mha", "mqa"])
def test_the_farthest_along_the_filter_stay_in_every_layer(heads, group):
    config = config_for(heads, 4, 2, num_heads=heads * group)
    profile = random_filters(config)
    events = [("read", [1, BUDGET, 70]), ("decode", 5), ("read", [9, 2, 0])]
    policy = QFilters(budget=BUDGET, profile=profile)
    for layer in (0, 1):
        head = head_of(profile, layer, 4)
        assert_same(policy, head, events, heads=heads, group=group, layer=layer, layers=2)


def test_a_row_equals_the_row_alone():
    policy = QFilters(budget=BUDGET, profile=random_filters(config_for(2, 4, 1, num_heads=4)))
    assert_alone(policy, [("read", [20, 70, 3]), ("decode", 4), ("read", [6, 1, 9])])


def test_the_filter_is_the_first_singular_vector_of_the_queries_on_their_side():
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(6)
    queries = rng.standard_normal((300, 2, 2, 6)) - 4 * shared  # the mean is on the other side
    found = filters_of(queries.sum(axis=0), np.einsum("nhgd,nhge->hgde", queries, queries))
    for head in range(2):
        every = []
        for group in range(2):
            first = np.linalg.svd(queries[:, head, group])[2][0]
            every.append(first * np.sign(first @ queries[:, head, group].mean(axis=0)))
        np.testing.assert_allclose(found[head], np.mean(every, axis=0), atol=1e-6)
    assert (found @ shared < 0).all()


def test_calibration_reads_every_text_and_its_file_is_the_policys(tmp_path):
    lm = toys.tiny_model()
    profile = query_filters(lm, [TEXT * 2, TEXT[:50]], tokens=60)
    assert profile.pieces == 5 and profile.tokens == 2 * len(TEXT) + 50
    # Layer 0's queries need no attention.
    sums, products = 0, 0
    ids = [TEXT * 2, TEXT[:50]]
    for piece in [text[i : i + 60] for text in ids for i in range(0, len(text), 60)]:
        tokens = jnp.asarray([lm.tokenizer.encode(piece)])
        q, _, _ = lm.params.layers[0].project(lm.params.embed(tokens))
        cos, sin = angles(lm.config, jnp.arange(len(piece))[None], jnp.asarray([len(piece)]))
        q = np.asarray(rotate(q[0], cos[0, :, None, None], sin[0, :, None, None]), np.float64)
        sums, products = sums + q.sum(axis=0), products + np.einsum("nhgd,nhge->hgde", q, q)
    np.testing.assert_allclose(profile.filters[0], filters_of(sums, products).ravel(), atol=2e-4)
    path = tmp_path / "toy.yaml"
    save_profile(profile, path)
    assert load_profile(path) == profile
    policy = f"qfilters:budget=24,profile={path}"
    assert np.mean(kvjax.generate(lm, TEXT, policy=policy, max_new_tokens=1).stats.retained) == 24
    over = kvjax.generate(lm, TEXT, policy=ChunkKV(budget=24, inner=QFilters(profile=profile)), max_new_tokens=1)
    kvjax.save_cache(tmp_path / "cache", over.cache, lm)
    assert kvjax.load_cache(tmp_path / "cache", lm).policy == over.cache.policy


@pytest.mark.parametrize("size", [dict(budget=100), dict(ratio=0.25)])
def test_a_plan_is_what_is_kept(size):
    lm = toys.tiny_model()
    policy = QFilters(profile=random_filters(lm.config), **size)
    output = kvjax.generate(lm, [65] * 400, policy=policy, max_new_tokens=1)
    assert np.mean(output.stats.retained) == 100
    assert kvjax.plan(lm, prompt_tokens=400, policy=policy, max_new_tokens=1).cache_bytes == output.cache.nbytes


def test_what_has_no_filters_is_one_sentence():
    lm = toys.tiny_model()
    with pytest.raises(UsageError, match="kvjax calibrate qfilters"):
        kvjax.generate(lm, TEXT, policy="qfilters:budget=20")
    other = random_filters(dataclasses.replace(lm.config, num_layers=3))
    with pytest.raises(UsageError, match="belongs to another model"):
        kvjax.generate(lm, TEXT, policy=QFilters(profile=other))
    with pytest.raises(UsageError, match="profile is 7"):
        QFilters(profile=7)
    with pytest.raises(UsageError, match="a policy within another one"):
        kvjax.Razor(inner=QFilters(budget=30))
    with pytest.raises(UsageError, match="no tokens to read"):
        query_filters(lm, [""])


@pytest.mark.model
def test_the_default_models_filters_come_along(default_model):
    found = packaged(kvjax.calibrate.FilterProfile, default_model.config)
    assert found is not None and found.kind == "qfilters"
    assert np.abs(np.linalg.norm(np.array(found.filters).reshape(30, 3, 64), axis=-1)).max() <= 1 + 1e-3
