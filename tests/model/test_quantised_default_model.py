"""Quantised weights of the default model: their bytes, and what they cost in likelihood of texts."""

from __future__ import annotations

import importlib
import inspect

import jax
import numpy as np
import pytest

import kvjax

TOKENS = 160
#: Modules whose docstrings are long: texts that are wherever the tests run.
MODULES = (
    "argparse configparser csv difflib doctest heapq inspect optparse pdb random shelve smtplib statistics subprocess "
    "timeit tokenize trace turtle typing unittest"
).split()


@pytest.fixture(scope="module")
def int8(default_model):
    return kvjax.load(default_model.name, dtype="float32", weights="int8", progress=False)


def likelihoods(lm: kvjax.LanguageModel) -> float:
    """Mean negative log-likelihood of the tokens of docstrings, each but for its first."""
    texts = [inspect.getdoc(importlib.import_module(name)) or "" for name in MODULES]
    ids = [lm.tokenizer.encode(text)[: TOKENS + 1] for text in texts]
    found = kvjax.score(lm, [each[:1] for each in ids], [each[1:] for each in ids])
    return float(-np.concatenate([score.logprobs for score in found]).mean())


def test_a_quarter_of_the_bytes(default_model, int8):
    floats, integers = (sum(x.nbytes for x in jax.tree.leaves(lm.params)) for lm in (default_model, int8))
    assert integers <= 0.27 * floats
    planned = kvjax.plan(kvjax.load_config(default_model.name), prompt_tokens=8, weights="int8")
    assert planned.weights_bytes == integers


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.005), ("file", 0.0075), ("int4", 0.2), ("fp8", 0.03)])
def test_twenty_texts_are_nearly_as_likely(default_model, weights, most):
    """The file's numbers lose by rounded activations alone; int4 rounds once more what the file has in 4 bits."""
    quantised = kvjax.load(default_model.name, dtype="float32", weights=weights, progress=False)
    one, other = (likelihoods(lm) for lm in (default_model, quantised))
    assert abs(other / one - 1) < most, f"{one:.4f} {other:.4f}"
