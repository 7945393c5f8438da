"""Tiny random models of every family and variation: their Hugging Face configurations and their weights.

Nothing is stored: weights and tokens come from NumPy's frozen ``RandomState`` stream, seeded by the case's name, so
the script that asks the reference implementation and the test that asks kvjax see the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from typing import Any

import numpy as np

VOCAB = 48
# The first positions, where a wrong mask shows, and the last ones, where a wrong rotation shows.
STORED_HEAD, STORED_TAIL = 3, 9


@dataclasses.dataclass(frozen=True)
class TinyCase:
    """One configuration and the prompt lengths (tokens) it is asked at, each on its own."""

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...] = (11, 40)

    def tokens(self, length: int) -> np.ndarray:
        """Token ids of the prompt of that length, int64 [length]."""
        return _random(f"{self.name}/{length}").randint(0, VOCAB, size=length)

    def stored_positions(self, length: int) -> np.ndarray:
        """Positions whose logits are kept: the first few and the last few."""
        return np.unique(np.r_[: min(STORED_HEAD, length), max(0, length - STORED_TAIL) : length])


def _random(key: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(key.encode()))


def _llama(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return base | changes


def _qwen2(**changes: Any) -> dict[str, Any]:
    config = _llama(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6)
    del config["attention_bias"], config["mlp_bias"]
    return config | {"use_sliding_window": False} | changes


def _mistral(**changes: Any) -> dict[str, Any]:
    config = _llama(architectures=["MistralForCausalLM"], model_type="mistral")
    del config["attention_bias"], config["mlp_bias"]
    return config | {"sliding_window": None} | changes


def _bloom(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "layer_norm_epsilon": 1e-5,
        "seq_length": 64,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return base | changes


def _scaled(**rope: Any) -> dict[str, Any]:
    """A llama whose scaling is written the way most published models write it: ``rope_theta`` + ``rope_scaling``."""
    top = {key: rope.pop(key) for key in ("max_position_embeddings", "rope_theta") if key in rope}
    return _llama(**top, rope_scaling=rope)


# A small base puts the ramp's edges between the four frequencies of head_dim 8.
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 20.0}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 1.7, 2.9, 4.0],
    "original_max_position_embeddings": 16,
}
_LONG_OUTSIDE = {key: value for key, value in _LONG.items() if key != "original_max_position_embeddings"}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: tuple[TinyCase, ...] = (
    TinyCase("llama_gqa", _llama()),
    TinyCase("llama_mha", _llama(num_key_value_heads=4)),
    TinyCase("llama_mqa", _llama(num_key_value_heads=1)),
    TinyCase("llama_tied", _llama(tie_word_embeddings=True)),
    TinyCase("llama_attention_bias", _llama(attention_bias=True)),
    TinyCase("llama_mlp_bias", _llama(mlp_bias=True)),
    TinyCase("llama_all_bias_tied", _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    # head_dim x heads differs from hidden_size, and three heads share no power of two.
    TinyCase("llama_head_dim", _llama(head_dim=12, num_attention_heads=6, num_key_value_heads=3, hidden_size=48)),
    TinyCase("llama_eps_theta", _llama(rms_norm_eps=1e-2, rope_theta=500000.0)),
    TinyCase("llama_linear", _scaled(rope_type="linear", factor=4.0)),
    TinyCase("llama_linear_legacy", _scaled(type="linear", factor=2.5)),
    TinyCase("llama_dynamic", _scaled(rope_type="dynamic", factor=3.0, max_position_embeddings=16), (11, 16, 17, 40)),
    TinyCase("llama_yarn", _scaled(**_YARN)),
    TinyCase("llama_yarn_betas", _scaled(**_YARN, beta_fast=2.0, beta_slow=0.25)),
    TinyCase("llama_yarn_untruncated", _scaled(**_YARN, beta_fast=2.0, beta_slow=0.25, truncate=False)),
    TinyCase("llama_yarn_attention_factor", _scaled(**_YARN, attention_factor=1.37)),
    TinyCase("llama_yarn_mscale", _scaled(**_YARN, mscale=1.2, mscale_all_dim=0.7)),
    # Without an original length the whole context is the original one.
    TinyCase("llama_yarn_no_original", _scaled(rope_type="yarn", factor=4.0, rope_theta=50.0)),
    TinyCase("llama_longrope", _scaled(**_LONG), (11, 16, 17, 40)),
    # Phi-3's files keep the original length outside the scaling table.
    TinyCase("llama_longrope_outside", _llama(rope_scaling=_LONG_OUTSIDE, original_max_position_embeddings=16)),
    TinyCase("llama_longrope_factor", _scaled(**_LONG, factor=8.0)),
    TinyCase("llama_longrope_attention_factor", _scaled(**_LONG, attention_factor=1.21)),
    TinyCase("llama_llama3", _scaled(**_LLAMA3, rope_theta=500.0), (11, 31, 60)),
    # The newer files: one rope_parameters table holding theta as well.
    TinyCase("llama_llama3_new", _llama(rope_theta=None, rope_parameters=_LLAMA3 | {"rope_theta": 300.0}), (11, 60)),
    TinyCase("llama_default_new", _llama(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 3e4})),
    TinyCase("mistral_gqa", _mistral()),
    TinyCase("mistral_head_dim_tied", _mistral(head_dim=12, tie_word_embeddings=True)),
    TinyCase("qwen2_gqa", _qwen2()),
    TinyCase("qwen2_mqa_tied", _qwen2(num_key_value_heads=1, tie_word_embeddings=True)),
    TinyCase("qwen2_mha", _qwen2(num_key_value_heads=4)),
    TinyCase(
        "qwen2_yarn", _qwen2(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})
    ),
    # Head counts that are a power of two, and those whose slopes come from two sequences.
    TinyCase("bloom_2_heads", _bloom(num_attention_heads=2)),
    TinyCase("bloom_3_heads", _bloom(num_attention_heads=3), (40,)),
    TinyCase("bloom_8_heads", _bloom(num_attention_heads=8), (40,)),
    TinyCase("bloom_12_heads", _bloom(num_attention_heads=12), (40,)),
    TinyCase("bloom_untied_odd_head_dim", _bloom(hidden_size=45, num_attention_heads=3, tie_word_embeddings=False)),
    # The published files' names of the sizes, and a prompt longer than one block of queries.
    TinyCase(
        "bloom_old_names",
        _bloom(
            hidden_size=None,
            num_hidden_layers=None,
            num_attention_heads=None,
            n_embed=48,
            n_layer=2,
            n_head=6,
            n_inner=None,
            layer_norm_epsilon=1e-2,
        ),
        (11, 300),
    ),
)


def weights(case: TinyCase) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint under Hugging Face's names, float32, in the reference's [out, in] orientation."""
    return _bloom_weights(case) if case.config["model_type"] == "bloom" else _llama_weights(case)


class _Tensors(dict[str, np.ndarray]):
    """Random tensors by name."""

    def __init__(self, case: TinyCase):
        super().__init__()
        self.random = _random(case.name)

    def linear(self, name: str, rows: int, columns: int, bias: bool, gain: float = 1.0) -> None:
        values = self.random.standard_normal((rows, columns)) * gain * columns**-0.5
        self[f"{name}.weight"] = values.astype(np.float32)
        if bias:
            self[f"{name}.bias"] = (self.random.standard_normal(rows) * 0.5).astype(np.float32)

    def norm(self, name: str, size: int, bias: bool = False) -> None:
        self[f"{name}.weight"] = (1 + 0.3 * self.random.standard_normal(size)).astype(np.float32)
        if bias:
            self[f"{name}.bias"] = (self.random.standard_normal(size) * 0.3).astype(np.float32)


def _llama_weights(case: TinyCase) -> dict[str, np.ndarray]:
    c = case.config
    hidden, inner, heads, kv_heads = (
        c[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = c.get("head_dim") or hidden // heads
    qkv_bias = c["model_type"] == "qwen2" or c.get("attention_bias", False)
    output_bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)
    tensors = _Tensors(case)
    tensors.linear("model.embed_tokens", VOCAB, hidden, False)
    for layer in range(c["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        tensors.norm(f"{block}.input_layernorm", hidden)
        # Large queries and keys make attention peaked, so that a wrong rotation cannot average away.
        tensors.linear(f"{block}.self_attn.q_proj", heads * dim, hidden, qkv_bias, gain=2.0)
        tensors.linear(f"{block}.self_attn.k_proj", kv_heads * dim, hidden, qkv_bias, gain=2.0)
        tensors.linear(f"{block}.self_attn.v_proj", kv_heads * dim, hidden, qkv_bias)
        tensors.linear(f"{block}.self_attn.o_proj", hidden, heads * dim, output_bias)
        if c["model_type"] == "qwen3":
            tensors.norm(f"{block}.self_attn.q_norm", dim)
            tensors.norm(f"{block}.self_attn.k_norm", dim)
        tensors.norm(f"{block}.post_attention_layernorm", hidden)
        tensors.linear(f"{block}.mlp.gate_proj", inner, hidden, mlp_bias)
        tensors.linear(f"{block}.mlp.up_proj", inner, hidden, mlp_bias)
        tensors.linear(f"{block}.mlp.down_proj", hidden, inner, mlp_bias)
    tensors.norm("model.norm", hidden)
    if not c["tie_word_embeddings"]:
        tensors.linear("lm_head", VOCAB, hidden, False)
    return tensors


def _bloom_weights(case: TinyCase) -> dict[str, np.ndarray]:
    c = case.config
    names = (("hidden_size", "n_embed"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    hidden, layers, heads = (c[new] or c[old] for new, old in names)
    tensors = _Tensors(case)
    tensors.linear("transformer.word_embeddings", VOCAB, hidden, False)
    tensors.norm("transformer.word_embeddings_layernorm", hidden, bias=True)
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        tensors.norm(f"{block}.input_layernorm", hidden, bias=True)
        tensors.linear(f"{block}.self_attention.query_key_value", 3 * hidden, hidden, True)
        # Large queries and keys (of head after head: a query, a key and a value), as above.
        tensors[f"{block}.self_attention.query_key_value.weight"].reshape(heads, 3, -1)[:, :2] *= 2
        tensors.linear(f"{block}.self_attention.dense", hidden, hidden, True)
        tensors.norm(f"{block}.post_attention_layernorm", hidden, bias=True)
        tensors.linear(f"{block}.mlp.dense_h_to_4h", 4 * hidden, hidden, True)
        tensors.linear(f"{block}.mlp.dense_4h_to_h", hidden, 4 * hidden, True)
    tensors.norm("transformer.ln_f", hidden, bias=True)
    if not c["tie_word_embeddings"]:
        tensors.linear("lm_head", VOCAB, hidden, False)
    return tensors


def write_folder(case: TinyCase, folder: pathlib.Path) -> pathlib.Path:
    """Write the case as a Hugging Face model folder (config, weights, a tokenizer of one word an id); return it."""
    import tokenizers
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # None means "not in the file", except for the one key whose null has a meaning.
    config = {key: value for key, value in case.config.items() if value is not None or key == "sliding_window"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    # Qwen2's tokenizer class adds this token where it is missing, and the model has no room for one more.
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, VOCAB))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
