"""RazorAttention on a model whose retrieval heads are known to matter (the paper's Table 1).

Protecting the heads that calibration finds keeps recall; protecting as many random heads loses it, and so does
protecting none.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.recall import oracle
from support.recall.asking import FOLDER, WINDOW, make_haystacks, recall

import kvjax
from kvjax.calibrate import retrieval_heads
from kvjax.calibrate.retrieval import first_token, random_tokens
from kvjax.policies import RazorAttention

#: Sinks, window and compensation token of the heads that are not protected.
BUDGET = 4 + WINDOW + 1


@pytest.fixture(scope="module")
def lm():
    return kvjax.load(FOLDER, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def haystacks():
    return make_haystacks()


@pytest.fixture(scope="module")
def profile(lm):
    return retrieval_heads(lm)


def heads_of(policy: RazorAttention, lm) -> list[tuple[int, int]]:
    return [(layer, head) for layer, heads in enumerate(policy.protected(lm.config)) for head in heads]


def test_the_profile_is_the_definitions(lm, profile):
    tokens = np.concatenate([first_token(lm), *[random_tokens(lm, profile.tokens, profile.seed)] * profile.repeats])
    assert tokens[0] == 0 and len(tokens) == 509
    scores = oracle.head_scores(oracle.forward(FOLDER, tokens)[1], tokens, profile.tokens, 1)
    np.testing.assert_allclose(profile.induction, scores["induction"], atol=2e-5)
    np.testing.assert_allclose(profile.echo, scores["echo"], atol=2e-5)


@pytest.fixture(scope="module")
def found(lm, profile, haystacks):
    """The paper's shares: 14 % of 24 heads by induction and 1 % by echo, so 4 heads at most."""
    policy = RazorAttention(profile=profile, budget=BUDGET)
    return policy, recall(lm, haystacks, policy)


@pytest.mark.slow
def test_protecting_the_found_heads_keeps_recall(lm, haystacks, found):
    policy, kept = found
    full = recall(lm, haystacks, kvjax.Full())
    assert 1 <= len(heads_of(policy, lm)) <= 4
    assert full.both > 0.85 and kept.both >= 0.95 * full.both
    # 4 of 24 heads whole and 20 of them at a ninth.
    assert kept.share < 0.3


@pytest.mark.slow
def test_protecting_as_many_random_heads_loses_it(lm, haystacks, found):
    policy, kept = found
    heads = [(layer, head) for layer in range(lm.config.num_layers) for head in range(lm.config.num_kv_heads)]
    count, drawn = len(heads_of(policy, lm)), []
    for seed in range(2):
        chosen = np.random.RandomState(seed).permutation(len(heads))[:count]
        drawn.append(recall(lm, haystacks, RazorAttention(heads=tuple(heads[i] for i in chosen), budget=BUDGET)))
    assert all(random.share == pytest.approx(kept.share) for random in drawn)
    assert np.mean([random.both for random in drawn]) < 0.5 * kept.both, drawn


@pytest.mark.slow
def test_protecting_none_loses_it(lm, haystacks):
    none = recall(lm, haystacks, RazorAttention(heads=(), budget=BUDGET))
    assert none.both < 0.1


@pytest.mark.slow
def test_the_share_of_heads_decides(lm, profile, haystacks, found):
    """One head of several is not enough, and the compensation token is not what recalls."""
    policy, kept = found
    fewer = RazorAttention(profile=profile, induction_share=0.01, echo_share=0.0, budget=BUDGET)
    assert len(heads_of(fewer, lm)) == 1 < len(heads_of(policy, lm))
    assert recall(lm, haystacks, fewer).both < kept.both
    plain = recall(lm, haystacks, RazorAttention(profile=profile, budget=BUDGET, compensation=False))
    assert plain.both >= 0.9 * kept.both
