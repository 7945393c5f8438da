"""Plain re-implementations that generation is compared with: one token at a time, no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import materialised
from kvjax.cache.pool import keys_and_values
from kvjax.runtime.prefill import logits_of

_ROOM = 256


def next_logits(lm, ids: Sequence[int]) -> np.ndarray:
    """[V] logits of what follows ``ids``, from the whole sequence anew."""
    tokens = np.zeros((1, _ROOM), np.int32)
    tokens[0, : len(ids)] = ids
    return np.asarray(logits_of(lm.params, jnp.asarray(tokens), jnp.asarray([len(ids)], jnp.int32))[0, len(ids) - 1])


def greedy(lm, ids: Sequence[int], steps: int, penalty: float = 1.0) -> tuple[tuple[int, ...], list[float]]:
    """Tokens and their log-probabilities by argmax on the growing sequence."""
    ids, made, logprobs = list(ids), [], []
    for _ in range(steps):
        logits = next_logits(lm, ids)
        scores = logits.copy()
        there = sorted(set(ids))
        scores[there] = np.where(scores[there] > 0, scores[there] / penalty, scores[there] * penalty)
        token = int(scores.argmax())
        logprobs.append(float(jax.nn.log_softmax(logits)[token]))
        ids.append(token)
        made.append(token)
    return tuple(made), logprobs


def live(cache) -> list[np.ndarray]:
    """Keys and values of the slots each layer and head of a cache of batch 1 holds."""
    found = []
    for layer in materialised(cache).layers:
        lengths = np.asarray(layer.length)[0]
        for x in keys_and_values(layer):
            found += [np.asarray(x)[0, head, :length] for head, length in enumerate(lengths)]
    return found


def same_caches(a, b, atol: float = 1e-5) -> None:
    """Assert that two caches of batch 1 hold the same."""
    np.testing.assert_array_equal(a.seen, b.seen)
    np.testing.assert_array_equal(a.next_token, b.next_token)
    for x, y in zip(live(a), live(b), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=atol)
