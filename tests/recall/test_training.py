"""The recipe that made the recall model still trains, and what it writes is what kvjax loads."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.recall import task, training

import kvjax
from kvjax.runtime.prefill import logits_of

SMALL = dataclasses.replace(training.CONFIG, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2,
                            num_kv_heads=2, head_dim=16)  # fmt: skip


def test_the_script_and_the_model_are_of_this_recipe():
    stored = kvjax.load(pathlib.Path(__file__).parents[1] / "golden" / "recall", progress=False)
    assert stored.config == training.CONFIG
    assert stored.tokenizer.prefix_ids == (task.BOS,) and stored.stop_token_ids == ()


@pytest.mark.slow
def test_a_few_steps_reduce_the_loss():
    phase, said = training.Phase(24, 60, 32, 1.0, 0.01), []
    params, losses = training.train(SMALL, (phase,), seed=1, report=lambda *x: said.append(x))
    assert np.isfinite(losses).all() and said == [(i + 1, phase, loss) for i, loss in enumerate(losses)]
    # A model that knows nothing loses log 255 = 5.54 and what its random certainty costs.
    assert 5.5 < losses[:3].mean() < 7
    assert losses[-5:].mean() < losses[:3].mean() - 0.2
    assert params.dtype == np.float32


def test_a_batch_is_decided_by_its_seed_and_mixes_the_tasks():
    phase = training.Phase(64, 1, 40, 0.5, 0.1)
    (tokens, asked), again = (training.batch(np.random.RandomState(1), phase) for _ in range(2))
    np.testing.assert_array_equal(tokens, again[0])
    assert tokens.shape == asked.shape == (40, 64) and (tokens[:, 0] == task.BOS).all()
    questions = ~asked[:, : 64 - 3 * 5].any(1)
    assert 8 < questions.sum() < 32


@pytest.mark.slow
def test_far_attention_has_a_price_that_favours_few_heads():
    params = training.start(SMALL, seed=0)
    tokens, asked = map(jnp.asarray, training.batch(np.random.RandomState(0), training.Phase(64, 1, 4, 0.5, 0.1)))
    free, entropy = training.loss(params, tokens, asked, 0.0)
    priced, same = training.loss(params, tokens, asked, 0.5)
    _, far = training.forward(params, jnp.asarray(tokens))
    assert far.shape == (2, 2, 1) and far.min() > 0 and far.max() < 1
    assert free == entropy == same
    assert priced - free == pytest.approx(0.5 * np.sqrt(np.asarray(far) + 1e-3).sum(), rel=1e-5)


def test_what_is_written_is_what_is_loaded(tmp_path):
    params = training.start(SMALL, seed=2)
    lm = kvjax.load(training.write_folder(params, tmp_path / "model", np.float32), dtype="float32", progress=False)
    assert lm.config == SMALL
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(lm.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tokens = task.repeats(np.random.RandomState(3), 2, 40)[0]
    dense, _ = training.forward(params, jnp.asarray(tokens))
    served = logits_of(lm.params, jnp.asarray(np.pad(tokens, ((0, 0), (0, 24)))), jnp.array([40, 40]))[:, :40]
    assert np.abs(dense - served).max() <= 1e-4 * np.std(dense)


def test_tasks_ask_only_for_what_can_be_known():
    random = np.random.RandomState(4)
    for _ in range(5):
        tokens, asked = task.repeats(random, 3, 64)
        for row, mask in zip(tokens, asked, strict=True):
            first = int(mask.argmax())
            assert mask[first:].all() and first >= 10
            for place in np.flatnonzero(mask):  # the token before was there, followed by this one
                before = np.flatnonzero(row[: place - 1] == row[place - 1])
                assert before.size and (row[before + 1] == row[place]).all()
        tokens, asked = task.questions(random, 3, 128)
        for row, mask in zip(tokens, asked, strict=True):
            for place in np.flatnonzero(mask):
                (before,) = np.flatnonzero(row[: place - 1] == row[place - 1])
                assert row[before + 1] == row[place] and row[place] in task.VALUES


def test_haystacks_hide_their_pairs_before_the_tail():
    random = np.random.RandomState(5)
    for pairs, length, tail in ((8, 480, 96), (1, 20, 16), (16, 50, 1)):
        tokens, hidden = task.haystack(random, length, pairs, tail)
        assert tokens[0] == task.BOS and np.isin(tokens[length - tail :], task.NOISE).all()
        assert len(set(hidden.ravel().tolist())) == 3 * pairs
        for key, *values in hidden:
            (place,) = np.flatnonzero(tokens == key)
            assert tokens[place + 1 : place + 3].tolist() == values
