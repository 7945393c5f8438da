"""ChatGLM and Baichuan, which transformers lacks, against forward passes in NumPy written from their papers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import family_cases as cases
from support import family_oracle as oracle
from support.own_cases import ALIBI, CHATGLM, ROTARY, baichuan_shapes, chatglm_shapes

import kvjax
from kvjax.checkpoints.load import load
from kvjax.runtime.prefill import logits_of


def logits(lm: kvjax.LanguageModel, tokens: np.ndarray) -> np.ndarray:
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(logits_of(lm.params, jnp.asarray(padded), jnp.array([len(tokens)])))[0, : len(tokens)]


def check(case, shapes, reference, folder) -> kvjax.LanguageModel:
    tensors = cases.values(case, shapes)
    lm = load(cases.write_folder(case, folder / case.name, tensors), dtype="float32", progress=False)
    for length in case.lengths:
        want = reference(case, tensors, case.tokens(length))
        np.testing.assert_allclose(logits(lm, case.tokens(length)), want, atol=1e-4 * want.std(), rtol=0)
    return lm


def test_chatglm(tmp_path):
    # GLM's files list buffers that follow from the configuration.
    shapes = chatglm_shapes() | {"transformer.rotary_pos_emb.inv_freq": [2]}
    lm = check(CHATGLM, shapes, oracle.chatglm, tmp_path)
    assert lm.config.rotary_dim == 4 and lm.config.qkv_bias and not lm.config.output_bias


@pytest.mark.parametrize(("case", "positional"), [(ROTARY, "rope"), (ALIBI, "alibi")], ids=["7b", "13b"])
def test_baichuan_2(case, positional, tmp_path):
    lm = check(case, baichuan_shapes(), oracle.baichuan, tmp_path)
    assert lm.config.positional == positional
    rows = np.asarray(lm.params.head[...])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


def test_baichuan_1_has_an_ordinary_head(tmp_path):
    case = cases.FamilyCase("baichuan_1", ROTARY.config | {"vocab_size": 64000}, lengths=(17,))
    lm = check(case, baichuan_shapes(64000), oracle.baichuan, tmp_path)
    assert np.linalg.norm(np.asarray(lm.params.head[...]), axis=1).std() > 0.01


@pytest.mark.slow
def test_alibi_beside_rms_norms_and_a_gate_generates_and_compresses(tmp_path):
    """RazorAttention's own model: its scopes bound the heads, and decoding gives what reading gives."""
    lm = load(
        cases.write_folder(ALIBI, tmp_path / "m", cases.values(ALIBI, baichuan_shapes())),
        dtype="float32",
        progress=False,
    )
    prompt = ALIBI.tokens(30).tolist()
    output = kvjax.generate(lm, prompt, max_new_tokens=6, logprobs=True, stop_token_ids=[])
    rows = logits(lm, np.array([*prompt, *output.tokens]))[29:-1].astype(np.float64)
    want = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.logprobs, want[np.arange(6), output.tokens], atol=1e-4)
    scopes = kvjax.calibrate.alibi_scopes(lm)
    for policy in (
        kvjax.Razor(profile=scopes, bound="scaled"),
        "lagkv:ratio=0.5,lag=4,sink=2",
        "h2o:budget=12",
        "streamingllm:window=8",
    ):
        assert len(kvjax.generate(lm, prompt, policy=policy, max_new_tokens=6, stop_token_ids=[]).tokens) == 6
