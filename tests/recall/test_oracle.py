"""The scores' oracle on attention whose scores are known."""

from __future__ import annotations

import numpy as np
from support.recall import oracle


def test_scores_of_perfect_and_of_uniform_heads():
    period, tokens = 5, oracle.repeated_segment(12, 5)
    count = len(tokens)
    assert count == 21 and len(set(tokens[1:6])) == 5
    echo, induction, uniform = np.zeros((3, count, count))
    for query in range(count):
        uniform[query, : query + 1] = 1 / (query + 1)
        back = query - period if query > period else 0
        echo[query, back] = 1
        induction[query, back + 1 if query > period else 0] = 1
    scores = oracle.head_scores(np.stack([echo, induction, uniform])[None], tokens, period, 1)
    np.testing.assert_array_equal(scores["echo"][0, :2], [1, 0])
    np.testing.assert_array_equal(scores["induction"][0, :2], [0, 1])
    # The query at position p sees p + 1 keys, and as many earlier copies as whole periods lie before it.
    queries = np.arange(period + 1, count)
    expected = np.mean((queries - 1) // period / (queries + 1))
    np.testing.assert_allclose([scores["echo"][0, 2], scores["induction"][0, 2]], expected, rtol=1e-12)


def test_a_token_twice_in_the_segment_counts_wherever_it_stands():
    tokens = np.array([0, 7, 7, 3, 7, 7, 3])
    weights = np.tril(np.ones((7, 7))) / np.arange(1, 8)[:, None]
    scores = oracle.head_scores(weights[None, None], tokens, 3, 1)
    # Position 4 has copies at 1, 2; position 5 at 1, 2, 4; position 6 at 3.
    np.testing.assert_allclose(scores["echo"], np.mean([2 / 5, 3 / 6, 1 / 7]))
    np.testing.assert_allclose(scores["induction"], np.mean([2 / 5, 3 / 6, 1 / 7]))
