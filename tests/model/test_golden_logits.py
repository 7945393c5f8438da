"""Logits equal the reference implementation's in float32; ``scripts/golden_logits.py`` made the golden values."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

import kvjax
from kvjax.checkpoints.load import load
from kvjax.runtime.prefill import logits_of

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = np.load(GOLDEN / "tiny_logits.npz")
SMOLLM2 = json.loads((GOLDEN / "smollm2.json").read_text())
# Largest difference, in standard deviations of the reference's logits.
TOLERANCE = 1e-4


def logits(params, tokens, room: int = 0) -> np.ndarray:
    """Float32 [T, V] of one prompt, in a batch padded to ``room`` tokens."""
    padded = np.zeros((1, max(room, len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(logits_of(params, jnp.asarray(padded), jnp.array([len(tokens)])))[0, : len(tokens)]


def test_every_stored_value_has_a_case():
    assert set(TINY.files) == {f"{case.name}/{length}" for case in tiny.CASES for length in case.lengths}


@pytest.mark.parametrize("case", tiny.CASES, ids=lambda case: case.name)
def test_tiny_models(case, tmp_path):
    lm = load(tiny.write_folder(case, tmp_path / case.name), dtype="float32", progress=False)
    for length in case.lengths:
        golden = TINY[f"{case.name}/{length}"]
        ours = logits(lm.params, case.tokens(length), room=64)[case.stored_positions(length)]
        assert np.abs(ours - golden).max() / golden.std() <= TOLERANCE, f"{length} tokens"


@pytest.mark.parametrize("prompt", SMOLLM2["prompts"], ids=lambda prompt: prompt["name"])
def test_default_model(prompt, default_model):
    golden, name = np.load(GOLDEN / "smollm2_logits.npz"), prompt["name"]
    ours = logits(default_model.params, prompt["ids"], room=512)[golden[f"{name}/positions"]]
    std = golden[f"{name}/std"][:, None]
    difference = np.abs(ours[:, golden["vocab_subset"]] - golden[f"{name}/logits"]) / std
    assert difference.max() <= TOLERANCE
    # The rest of each row through its moments: they cannot hide a difference as large as the tolerance everywhere.
    assert np.abs((ours.mean(-1) - golden[f"{name}/mean"]) / std[:, 0]).max() <= TOLERANCE
    assert np.abs(ours.std(-1) / std[:, 0] - 1).max() <= TOLERANCE
    np.testing.assert_array_equal(ours.argmax(-1), golden[f"{name}/argmax"])


@pytest.mark.slow
def test_default_model_continues_as_the_reference(default_model):
    # No step of the golden continuations is a near tie, so every token must be the same. One batch, one compilation.
    prompts = SMOLLM2["prompts"]
    assert min(margin for prompt in prompts for margin in prompt["margins"]) > 2 * TOLERANCE
    outputs = kvjax.generate(default_model, [prompt["ids"] for prompt in prompts], max_new_tokens=32)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.tokens) == 32 and list(output.tokens) == prompt["greedy"], prompt["name"]
