"""Models with sliding-window layers: rings of the window, whatever the policy of the global layers is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import kvjax
from kvjax.cache.groups import parts
from kvjax.checkpoints.families import FAMILIES
from kvjax.model.config import RopeConfig
from kvjax.policies import parse
from kvjax.policies.guard import check_kept
from kvjax.policies.window_layers import SlidingWindow, WithWindows, for_model
from kvjax.runtime.prefill import logits_of

WINDOW = 20
FEATURES = {
    "num_layers": 3,
    "windows": (WINDOW, None, WINDOW),
    "window_rope": RopeConfig(theta=50.0),
    "attention_soft_cap": 2.0,
}
LONG, SHORT = "Of ships, and of the men who built them by the sea.", "Of whales."
ROOM = 128


@pytest.fixture(scope="module")
def lm():
    return dataclasses.replace(toys.tiny_model(**FEATURES), stop_token_ids=())


def asked(lm, prompt, **options):
    return kvjax.generate(lm, prompt, max_new_tokens=6, logprobs=True, chat=False, **options)


def wanted(lm, ids: list[int], count: int) -> np.ndarray:
    """Log-probabilities of the last ``count`` of these tokens, all of them read at once."""
    padded = jnp.zeros((1, ROOM), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
    rows = jax.nn.log_softmax(logits_of(lm.params, padded, jnp.array([len(ids)]))[0])
    return np.asarray(rows[np.arange(len(ids) - count - 1, len(ids) - 1), ids[-count:]])


def test_every_turn_gives_what_reading_it_all_gives(lm):
    """Turns shorter and longer than the window, of rows of different lengths, decoded past the ring's end."""
    ids = [list(lm.tokenizer.encode(text)) for text in (LONG, SHORT)]
    cache, seen = None, [[], []]
    for turn in ([ids[0][:30], ids[1][:3]], [ids[1][:5], ids[0][:25]], [ids[0][:22], ids[1][:2]]):
        outputs = asked(lm, turn, **({} if cache is None else {"cache": cache}))
        for row, output in enumerate(outputs):
            seen[row] += [*turn[row], *output.tokens]
            np.testing.assert_allclose(output.logprobs, wanted(lm, seen[row], 6), atol=2e-5)
        cache = [output.cache for output in outputs]
    layers = outputs[0].cache.layers
    assert [parts(layer)[0].length.max() for layer in layers] == [WINDOW, len(seen[0]) - 1, WINDOW]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["model", "int8"])
def test_shared_contexts_and_chunks(lm, storage):
    policy = "lagkv:ratio=0.9,lag=8,sink=2,prefill=chunked"
    cache = kvjax.read(lm, LONG, policy=policy, storage=storage, chat=False)
    together = asked(lm, ["And?", "Who built them, and where?"], cache=cache)
    for question, output in zip(("And?", "Who built them, and where?"), together, strict=True):
        alone = asked(lm, question, context=LONG, policy=policy, storage=storage)
        assert alone.tokens == output.tokens
        np.testing.assert_allclose(alone.logprobs, output.logprobs, atol=1e-5)
    if storage == "model":
        both = asked(lm, ["And?", "Who?"], context=LONG)  # global layers share it, and rings are each row's own
        assert both[0].stats.shared_cache_bytes > 0
        assert [one.tokens for one in both] == [asked(lm, LONG + text).tokens for text in ("And?", "Who?")]


@pytest.mark.slow
def test_a_saved_conversation_goes_on(lm, tmp_path):
    first = asked(lm, LONG, policy="h2o:budget=12")
    kvjax.save_cache(tmp_path / "c", first.cache, lm)
    loaded = kvjax.load_cache(tmp_path / "c", lm)
    assert loaded.policy == first.cache.policy == WithWindows(parse("h2o:budget=12"), (WINDOW, None, WINDOW))
    again = asked(lm, "And?", cache=loaded, policy="h2o:budget=12")
    assert again.tokens == asked(lm, "And?", cache=first.cache).tokens
    with pytest.raises(kvjax.UsageError, match="was compressed by h2o:budget=12; it continues with that policy"):
        asked(lm, "And?", cache=loaded, policy="full")


def test_the_policy_sees_global_layers_alone(lm):
    """Its layer numbers, budgets and profiles count these."""
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Last(kvjax.Policy):
        """The last ten tokens."""

        def budgets(self, config, layer, total):
            seen.append((config.num_layers, layer))
            return kvjax.policies.per_head(kvjax.policies.numpy_or_jax(total).minimum(total, 10), config)

        def select(self, layer, cache, candidates, chunk):
            seen.append((chunk.config.num_layers, layer))
            keep = jnp.arange(candidates.k.shape[2]) >= candidates.length[..., None] - 10
            return kvjax.policies.selection(cache, candidates, keep & candidates.valid)

    output = asked(lm, LONG, policy=Last())
    assert set(seen) == {(1, 0)}
    assert [heads[0] for heads in output.stats.retained] == [WINDOW, 15, WINDOW]
    assert output.stats.windows == (WINDOW, None, WINDOW)


def test_a_slot_that_stands_for_many_is_counted_beside_the_tokens(lm):
    """Global layers have one where their policy merges, and windows have none."""
    merging, other = (for_model(parse(name), lm.config) for name in ("compensated:budget=12,sink=2", "h2o:budget=12"))
    assert merging.merges and not other.merges
    one_more = [np.array([[8, 8]])] * 3, np.array([7])
    check_kept(merging, (), *one_more)
    with pytest.raises(kvjax.UsageError, match="has 8 tokens in layer 0, head 0, and 7 were seen"):
        check_kept(other, (), *one_more)
    layers = asked(lm, LONG, policy=merging.policy).cache.layers
    assert [parts(layer)[0].log_mass is not None for layer in layers] == [False, True, False]


def test_retrieval_heads_are_those_of_global_layers(lm):
    profile = kvjax.calibrate.retrieval_heads(lm, tokens=20, repeats=2)
    assert np.shape(profile.echo) == (1, lm.config.num_heads)
    output = asked(lm, LONG, policy=kvjax.RazorAttention(profile=profile, budget=12, sink=2))
    assert len(output.tokens) == 6


def test_gemma_3_holds_what_it_promises():
    """1B at 32k: 22 of 26 layers hold 512 tokens, and a policy compresses the 4 others."""
    sizes = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768}
    raw = {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6, **sizes}
    config = FAMILIES["gemma3_text"].from_hf(raw, "x")
    token = 2 * 256 * 2
    full, lagkv = (
        kvjax.plan(config, prompt_tokens=32000, max_new_tokens=1, policy=policy, dtype="bfloat16")
        for policy in ("full", "lagkv:ratio=0.25")
    )
    assert full.full_cache_bytes == token * (22 * 512 + 4 * 32000)
    assert full.cache_bytes < 1.04 * full.full_cache_bytes < 0.18 * token * 26 * 32000
    assert lagkv.cache_bytes < 1.05 * token * (22 * 512 + 4 * 8192)
    assert "22 of 26 layers keep their last 512 tokens" in lagkv.table()
    assert "0-4    1 x 512;    1 x 512 retained (sliding window of 512)" in lagkv.table()
    assert "over global layers and heads: 24.8%" in lagkv.table()


def test_what_cannot_be(lm):
    with pytest.raises(kvjax.UsageError, match="layers that see a window of tokens; choose another policy"):
        asked(lm, LONG, policy="round:watershed=1")
    sliding = toys.tiny_model(windows=(WINDOW,))
    with pytest.raises(kvjax.UsageError, match="LagKV has nothing to choose; leave the policy out"):
        asked(sliding, LONG, policy="lagkv:ratio=0.5")
    assert len(asked(sliding, LONG).tokens) == 6
    with pytest.raises(kvjax.UsageError, match="none has heads that retrieve from afar"):
        kvjax.calibrate.retrieval_heads(sliding)
    for windows, says in (((1, 2, 3), "3 entries for 2 layers"), ((0,), "a layer's window")):
        with pytest.raises(kvjax.UsageError, match=says):
            toys.tiny_model(windows=windows)
    with pytest.raises(kvjax.UsageError, match="ALiBi has neither"):
        toys.tiny_model(windows=(8,), positional="alibi")


def test_a_model_without_windows_has_its_policy_as_it_is(tiny_model):
    policy = parse("lagkv:ratio=0.5")
    assert for_model(policy, tiny_model.config) is policy
    assert SlidingWindow().window == 4096
