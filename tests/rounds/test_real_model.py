"""Round Attention on the default model: the profile that comes with kvjax, and all rounds as the full cache."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax

TURNS = [
    "My name is Ada and my boat is called Lighthouse. Tell me a little about boats.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is my boat called?",
]


@pytest.mark.slow
def test_all_rounds_are_the_full_cache_and_one_of_ten_takes_less(default_model):
    full, every, some = (
        kvjax.Chat(default_model, policy=policy, max_new_tokens=24, logprobs=True)
        for policy in ("full", "round:top=1", "round")
    )
    for text in TURNS:
        wanted, found, less = (chat.send(text) for chat in (full, every, some))
        assert found.tokens == wanted.tokens
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=5e-3)
        assert less.stats.live_cache_bytes <= wanted.stats.live_cache_bytes
    assert less.stats.rounds.rounds == 3 and len(less.stats.rounds.selected) == 1
    assert less.stats.live_cache_bytes < 0.8 * wanted.stats.live_cache_bytes
