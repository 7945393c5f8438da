"""Writes tiny GGUF files from Hugging Face tensors, as llama.cpp's converter would."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np
from support import tiny

from kvjax.text.tokenizer import byte_level_alphabet

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BLOOM_NAMES = {
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "ln_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
# The byte alphabet, three merges, a control token and a user-defined one: 261 ids.
MERGES = ["h e", "l l", "he ll"]
TOKENS = [*byte_level_alphabet(), "he", "ll", "hell", "<|im_end|>", "<tool>"]
VOCAB = len(TOKENS)
END, TOOL = VOCAB - 2, VOCAB - 1
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute: interleaves the halves of every head's channels."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def case(name: str, **changes: Any) -> tiny.TinyCase:
    """One of the golden cases with this module's vocabulary."""
    found = next(case for case in tiny.CASES if case.name == name)
    return tiny.TinyCase(name, found.config | {"vocab_size": VOCAB} | changes)


def weights(chosen: tiny.TinyCase) -> dict[str, np.ndarray]:
    """The case's tensors under Hugging Face's names, with rows for every token of ``TOKENS``."""
    tensors = tiny.weights(chosen)
    random = np.random.default_rng(0)
    for name in ("model.embed_tokens.weight", "transformer.word_embeddings.weight", "lm_head.weight"):
        if name in tensors:
            more = random.standard_normal((VOCAB - len(tensors[name]), tensors[name].shape[1]), np.float32)
            tensors[name] = np.concatenate([tensors[name], more])
    return tensors


def write_folder(chosen: tiny.TinyCase, folder: pathlib.Path, *, template: bool = False) -> pathlib.Path:
    """The same model and tokenizer as ``write`` makes, in Hugging Face's form."""
    from safetensors.numpy import save_file

    from kvjax.text.gguf_tokenizer import tokenizer_from_gguf

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(chosen.config))
    save_file(weights(chosen), folder / "model.safetensors")
    tokenizer_from_gguf(_tokenizer_keys("gpt-2"), "test")._backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": TEMPLATE} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tokenizer_keys(pre: str) -> dict[str, Any]:
    kinds = [gguf.TokenType.NORMAL] * VOCAB
    kinds[END], kinds[TOOL] = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata(chosen: tiny.TinyCase, pre: str = "gpt-2") -> dict[str, Any]:
    """The keys of a case's file."""
    if chosen.config["model_type"] == "bloom":
        return _bloom_metadata(chosen, pre)
    c, arch = chosen.config, chosen.config["model_type"]
    arch = "llama" if arch == "mistral" else arch
    keys: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.freq_base": c["rope_theta"],
    }
    if "head_dim" in c:
        keys |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    return {f"{arch}.{key}": value for key, value in keys.items()} | _tokenizer_keys(pre)


def _bloom_metadata(chosen: tiny.TinyCase, pre: str) -> dict[str, Any]:
    c = chosen.config
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["seq_length"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": 4 * c["hidden_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_attention_heads"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
    }
    return {f"bloom.{key}": value for key, value in keys.items()} | _tokenizer_keys(pre)


def _bloom_tensors(chosen: tiny.TinyCase) -> dict[str, np.ndarray]:
    """llama.cpp's convert_hf_to_gguf.py, BloomModel: all queries, then all keys, then all values."""
    out, heads = {}, chosen.config["num_attention_heads"]
    for name, tensor in weights(chosen).items():
        stem, kind = name.removeprefix("transformer.").rsplit(".", 1)
        block = ""
        if stem.startswith("h."):
            _, index, stem = stem.split(".", 2)
            block = f"blk.{index}."
        if stem == "self_attention.query_key_value":
            tensor = tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
        out[f"{block}{_BLOOM_NAMES[stem]}.{kind}"] = tensor
    return out


def gguf_tensors(chosen: tiny.TinyCase) -> dict[str, np.ndarray]:
    """The case's tensors under GGUF's names, permuted where llama.cpp permutes."""
    if chosen.config["model_type"] == "bloom":
        return _bloom_tensors(chosen)
    c, out = chosen.config, {}
    for name, tensor in weights(chosen).items():
        stem, kind = name.rsplit(".", 1)
        block = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            block = f"blk.{index}."
        if c["model_type"] not in ("qwen2", "qwen3") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = permute(tensor, c["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"])
        out[f"{block}{_NAMES[stem]}.{kind}"] = tensor
    return out


def write(
    path: pathlib.Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> pathlib.Path:
    """Write a file; ``kinds`` names the tensors to quantise, or, where they are bytes, that are quantised."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            quantised = tensor if tensor.dtype == np.uint8 else gguf.quantize(tensor, kind)
            writer.add_tensor(name, quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_case(chosen: tiny.TinyCase, path: pathlib.Path, **extra: Any) -> pathlib.Path:
    """Write a case; ``extra`` adds keys to its metadata, or removes those given as None."""
    keys = {key: value for key, value in (metadata(chosen) | extra).items() if value is not None}
    kind = chosen.config["model_type"]
    arch = "llama" if kind == "mistral" else kind
    return write(path, arch, keys, gguf_tensors(chosen))
