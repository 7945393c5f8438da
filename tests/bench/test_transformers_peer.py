"""The transformers model built from kvjax's weights computes the same function (only where torch is installed)."""

from __future__ import annotations

import numpy as np
import pytest
import toys

torch = pytest.importorskip("torch", reason="torch is never needed; this compares with it where it is there")


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"family": "qwen2", "qkv_bias": True}])
def test_same_logits(changes):
    import jax.numpy as jnp

    from kvjax.bench.transformers_peer import TransformersPeer
    from kvjax.runtime.prefill import logits_of

    lm = toys.tiny_model(**changes)
    peer = TransformersPeer(lm.params, lm.config)
    ids = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 24))
    with torch.inference_mode():
        theirs = peer.model(input_ids=torch.from_numpy(ids)).logits.numpy()
    ours = np.asarray(logits_of(lm.params, jnp.asarray(ids, jnp.int32), jnp.asarray([24, 24], jnp.int32)))
    assert np.abs(ours - theirs).max() < 1e-4 * theirs.std()


def test_times_and_bytes():
    from kvjax.bench.transformers_peer import TransformersPeer

    lm = toys.tiny_model()
    peer = TransformersPeer(lm.params, lm.config)
    cache = peer.filled_cache(2, 32)
    assert peer.nbytes(cache) == 2 * 32 * 2 * 2 * 8 * 2 * 4
    for _ in range(2):
        assert peer.decode_seconds(cache, 2, 32, 3) > 0
        assert cache.get_seq_length() == 35
    assert peer.prefill_seconds(np.ones((1, 16), np.int64)) > 0
