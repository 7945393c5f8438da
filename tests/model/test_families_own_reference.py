"""ChatGLM and Baichuan, which transformers lacks, against forward passes in NumPy written from their papers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import family_cases as cases
from support import family_oracle as oracle

import kvjax
from kvjax.checkpoints.load import load
from kvjax.runtime.prefill import logits_of

_GLM = {
    "model_type": "chatglm", "padded_vocab_size": cases.VOCAB, "hidden_size": 32, "ffn_hidden_size": 56,
    "num_layers": 2, "num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2,
    "kv_channels": 8, "seq_length": 64, "layernorm_epsilon": 1.5625e-7, "rope_ratio": 0.05, "add_qkv_bias": True,
    "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "eos_token_id": 2,
}  # fmt: skip
_BAICHUAN = {
    "model_type": "baichuan", "vocab_size": cases.VOCAB, "hidden_size": 48, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 6, "rms_norm_eps": 1e-6, "model_max_length": 64,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
CHATGLM = cases.FamilyCase("chatglm", _GLM)
ROTARY = cases.FamilyCase("baichuan_7b", _BAICHUAN | {"max_position_embeddings": 64})
ALIBI = cases.FamilyCase("baichuan_13b", _BAICHUAN)


def chatglm_shapes() -> dict[str, list[int]]:
    shapes = {"transformer.embedding.word_embeddings.weight": [cases.VOCAB, 32]}
    for i in range(2):
        layer = f"transformer.encoder.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": [32],
            layer + "self_attention.query_key_value.weight": [64, 32],
            layer + "self_attention.query_key_value.bias": [64],
            layer + "self_attention.dense.weight": [32, 32],
            layer + "post_attention_layernorm.weight": [32],
            layer + "mlp.dense_h_to_4h.weight": [112, 32],
            layer + "mlp.dense_4h_to_h.weight": [32, 56],
        }
    shapes["transformer.encoder.final_layernorm.weight"] = [32]
    return shapes | {"transformer.output_layer.weight": [cases.VOCAB, 32]}


def baichuan_shapes(vocabulary: int = cases.VOCAB) -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [vocabulary, 48], "model.norm.weight": [48]}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": [48],
            layer + "self_attn.W_pack.weight": [144, 48],
            layer + "self_attn.o_proj.weight": [48, 48],
            layer + "post_attention_layernorm.weight": [48],
            layer + "mlp.gate_proj.weight": [40, 48],
            layer + "mlp.up_proj.weight": [40, 48],
            layer + "mlp.down_proj.weight": [48, 40],
        }
    return shapes | {"lm_head.weight": [vocabulary, 48]}


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
