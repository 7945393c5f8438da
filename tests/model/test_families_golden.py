"""Families' logits equal transformers' in float32; ``scripts/golden_families.py`` made the golden values."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import family_cases as cases

import kvjax
from kvjax.checkpoints.load import load
from kvjax.runtime.prefill import logits_of

GOLDEN = np.load(cases.GOLDEN / "families.npz")
#: Largest difference, in standard deviations of the reference's logits.
TOLERANCE = 1e-4
BY_NAME = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)


def loaded(case: cases.FamilyCase, folder) -> kvjax.LanguageModel:
    tensors = cases.values(case, cases.shapes(case))
    lm = load(cases.write_folder(case, folder / case.name, tensors), dtype="float32", progress=False)
    return dataclasses.replace(lm, stop_token_ids=())


def logits(lm: kvjax.LanguageModel, tokens: np.ndarray, room: int = 64) -> np.ndarray:
    """Float32 [T, V] of one prompt, in a batch padded to ``room`` tokens."""
    padded = np.zeros((1, room), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(logits_of(lm.params, jnp.asarray(padded), jnp.array([len(tokens)])))[0, : len(tokens)]


def test_every_stored_value_has_a_case():
    assert set(GOLDEN.files) == {f"{case.name}/{length}" for case in cases.CASES for length in case.lengths}


@BY_NAME
def test_logits_equal_the_references(case, tmp_path):
    lm = loaded(case, tmp_path)
    for length in case.lengths:
        want = GOLDEN[f"{case.name}/{length}"]
        np.testing.assert_allclose(logits(lm, case.tokens(length)), want, atol=TOLERANCE * want.std(), rtol=0)
    # Decoding gives what reading gives.
    prompt = case.tokens(17).tolist()
    output = kvjax.generate(lm, prompt, max_new_tokens=6, logprobs=True)
    rows = logits(lm, np.array([*prompt, *output.tokens]))[16:-1]
    wide = rows.astype(np.float64) - rows.max(-1, keepdims=True)
    want = (wide - np.log(np.exp(wide).sum(-1, keepdims=True)))[np.arange(6), output.tokens]
    np.testing.assert_allclose(output.logprobs, want, atol=1e-4)
