"""A small trained model recalls what is far away through its induction heads, and only while their cache is whole."""

from __future__ import annotations

import numpy as np
import pytest
from support.recall import oracle, task
from support.recall.asking import FOLDER, WINDOW, make_haystacks, recall

import kvjax


@pytest.fixture(scope="module")
def lm():
    return kvjax.load(FOLDER, dtype="float32", progress=False)


@pytest.fixture(scope="module")
def haystacks():
    return make_haystacks()


@pytest.fixture(scope="module")
def full(lm, haystacks):
    return recall(lm, haystacks, kvjax.Full())


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_000_000


@pytest.mark.slow
def test_recalls_with_the_whole_cache(full):
    assert full.both > 0.85


@pytest.mark.slow
def test_recent_tokens_alone_do_not_recall(lm, haystacks):
    """No pair is within the window, so what is left is to guess one of 64 values."""
    found = recall(lm, haystacks, kvjax.StreamingLLM(window=WINDOW))
    assert found.first < 0.15 and found.both < 0.05 and found.share == (4 + WINDOW) / 480


@pytest.fixture(scope="module")
def attention(lm):
    """Tokens of a repeated segment, with logits and attention of the reference."""
    tokens = oracle.repeated_segment(task.VOCAB, (lm.config.max_position - 1) // 4)
    return tokens, *oracle.forward(FOLDER, tokens)


def test_logits_are_the_references(lm, attention):
    tokens, logits, _ = attention
    output = kvjax.generate(lm, tokens[:300].tolist(), max_new_tokens=1, logprobs=True)
    row = logits[299] - np.log(np.exp(logits[299]).sum())
    assert output.tokens[0] == row.argmax()
    assert output.logprobs[0] == pytest.approx(row.max(), abs=1e-4)


def test_a_few_heads_are_induction_heads(attention):
    tokens, logits, weights = attention
    period = (len(tokens) - 1) // 4
    asked = np.arange(period + 2, len(tokens))
    assert (logits[asked - 1].argmax(-1) == tokens[asked]).mean() > 0.9, "it continues a segment it has seen"
    scores = oracle.head_scores(weights, tokens, period, 1)["induction"]
    assert 1 <= (scores > 0.5).sum() <= 0.3 * scores.size
    assert np.median(scores) < 0.1
    assert (scores > 0.3).any(1).argmax() > 0, "an induction head needs a layer before it"
