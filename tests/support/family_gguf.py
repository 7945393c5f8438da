"""Family cases as GGUF files, as llama.cpp's converter writes them: its names, keys and orders of rows."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from support import gguf_files
from support.family_cases import FamilyCase

ARCHITECTURES = {
    "gemma": "gemma", "phi": "phi2", "phi3": "phi3", "glm4": "glm4", "olmo2": "olmo2", "granite": "granite",
    "starcoder2": "starcoder2", "gpt_neox": "gptneox", "cohere": "command-r", "stablelm": "stablelm",
    "smollm3": "smollm3", "chatglm": "chatglm", "gemma2": "gemma2", "gemma3_text": "gemma3", "cohere2": "cohere2",
    "olmo3": "olmo2", "falcon": "falcon", "baichuan": "baichuan", "gpt_oss": "gpt-oss",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mpt": "mpt", "glm": "chatglm",
}  # fmt: skip
#: Architectures whose queries and keys are permuted for neighbouring pairs, as llama's.
#: Tensors of an expert, as mixtral and as qwen call them.
_OF_EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_PERMUTED = {"granite", "smollm3", "mixtral", "baichuan"}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.final_layernorm": "output_norm",
    "lm_head": "output", "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output", "transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm",
    "self_attention.query_key_value": "attn_qkv", "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm",
    "transformer.embedding.word_embeddings": "token_embd", "transformer.encoder.final_layernorm": "output_norm",
    "transformer.output_layer": "output",
    "self_attention.dense": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.dense": "attn_output", "attention.dense": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "attention.query_key_value": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "transformer.wte": "token_embd", "transformer.norm_f": "output_norm", "norm_1": "attn_norm", "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


_LAYERS = (
    "model.layers.", "gpt_neox.layers.", "transformer.h.", "transformer.encoder.layers.", "transformer.blocks.",
)  # fmt: skip


def _tensor(case: FamilyCase, stem: str, kind: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """The name after the block's, and the rows in the file's order."""
    c, family = case.config, case.config["model_type"]
    name = _NAMES[stem]
    if family in ("olmo2", "olmo3", "gemma2", "gemma3_text") and stem == "post_attention_layernorm":
        name = "post_attention_norm"
    if family in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm"):
        tensor = tensor + 1
    if family in _PERMUTED and name in ("attn_q", "attn_k"):
        heads = _usual_names(c)["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
        tensor = gguf_files.permute(tensor, heads)
    if family == "falcon" and name == "attn_qkv":
        kv, dim = _usual_names(c)["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
        each, rest = tensor.reshape(kv, -1, dim, *tensor.shape[1:]), tensor.shape[1:]
        tensor = np.concatenate([part.reshape(-1, *rest) for part in (each[:, :-2], each[:, -2], each[:, -1])])
    if family == "gpt_neox" and name == "attn_qkv":
        heads = c["num_attention_heads"]
        tensor = tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
    if family == "gpt_oss" and name == "ffn_norm":
        name = "post_attention_norm"
    if name == "ffn_gate_inp_shexp":
        tensor = tensor[0]
    return f"{name}.{kind}", tensor


def _without_factor(case: FamilyCase) -> dict[str, dict[str, Any]]:
    """OLMo 3's rotary embeddings with the factor that follows from the scaling."""
    tables = case.config.get("rope_parameters", {})
    return {kind: {k: v for k, v in table.items() if k != "attention_factor"} for kind, table in tables.items()}


def as_a_gguf_says(case: FamilyCase) -> FamilyCase:
    """A case of a family of which llama.cpp knows what no key says: the scale, which layers slide or have experts."""
    known = {
        "gemma2": {"query_pre_attn_scalar": 12},
        "gemma3_text": {
            "query_pre_attn_scalar": 12, "num_hidden_layers": 7, "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
        "gpt_oss": {"swiglu_limit": 7.0}, "olmo3": {"rope_parameters": _without_factor(case)},
        "cohere2": {"num_hidden_layers": 5, "sliding_window_pattern": 4},
        "qwen2_moe": {"mlp_only_layers": []}, "qwen3_moe": {"decoder_sparse_step": 1},
    }  # fmt: skip
    return dataclasses.replace(case, config={**case.config, **known.get(case.config["model_type"], {})})


def with_layers(shapes: Mapping[str, list[int]], layers: int, like: int = 0) -> dict[str, list[int]]:
    """Names and shapes of a model of so many layers, all like the one with that number."""
    known = f"model.layers.{like}."
    own = {name.removeprefix(known): shape for name, shape in shapes.items() if name.startswith(known)}
    rest = {name: shape for name, shape in shapes.items() if not name.startswith("model.layers.")}
    return rest | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in own.items()}


def tensors(case: FamilyCase, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for full, tensor in values.items():
        if ".mlp.experts." in full and case.config["model_type"] == "gpt_oss":
            out |= _experts_in_one(full, tensor)
            continue
        stem, kind = full.rsplit(".", 1) if not full.endswith("sinks") else (full, "weight")
        block = ""
        for prefix in _LAYERS:
            if stem.startswith(prefix):
                index, stem = stem.removeprefix(prefix).split(".", 1)
                block = f"blk.{index}."
        if "_layernorm.norms." in stem:
            stem, head = stem.split(".norms.")
            name = {"self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm"}[stem]
            stacked.setdefault(f"{block}{name}.{kind}", {})[int(head)] = tensor
            continue
        if ".experts." in stem:
            name = f"{block}ffn_{_OF_EXPERTS[stem.rsplit('.', 1)[1]]}_exps.{kind}"
            stacked.setdefault(name, {})[int(stem.rsplit(".", 2)[1])] = tensor
            continue
        if stem == "self_attn.W_pack":
            for part, own in zip("qkv", np.split(tensor, 3), strict=True):
                name, own = _tensor(case, f"self_attn.{part}_proj", kind, own)
                out[block + name] = own
            continue
        name, tensor = _tensor(case, stem, kind, tensor)
        out[block + name] = tensor
    return out | {name: np.stack([each[i] for i in sorted(each)]) for name, each in stacked.items()}


def _experts_in_one(full: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """gpt-oss's experts: a gate's output and what it gates by turns, inputs before outputs."""
    _, _, index, _, _, name = full.split(".")
    kind = "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if name.startswith("down"):
        return {f"blk.{index}.ffn_down_exps.{kind}": tensor}
    return {f"blk.{index}.ffn_{part}_exps.{kind}": tensor[:, i::2] for i, part in enumerate(("gate", "up"))}


def _usual_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration by the names that the others have."""
    if config["model_type"] == "falcon":
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        newer = config.get("new_decoder_architecture")
        kv = config["num_kv_heads"] if newer else 1 if config.get("multi_query", True) else heads
        inner = config.get("ffn_hidden_size", 4 * hidden)
        return {**config, "num_key_value_heads": kv, "intermediate_size": inner}
    if config["model_type"] == "baichuan":
        heads, context = config["num_attention_heads"], config["model_max_length"]
        return {**config, "num_key_value_heads": heads, "max_position_embeddings": context}
    if config["model_type"] == "mpt":
        names = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
        names |= {"max_seq_len": "max_position_embeddings"}
        own = {names.get(key, key): value for key, value in config.items()}
        return own | {"intermediate_size": 4 * config["d_model"]}
    if config["model_type"] != "chatglm":
        return config
    names = {"num_layers": "num_hidden_layers", "seq_length": "max_position_embeddings", "kv_channels": "head_dim"}
    names |= {"ffn_hidden_size": "intermediate_size", "multi_query_group_num": "num_key_value_heads"}
    names |= {"layernorm_epsilon": "rms_norm_eps", "padded_vocab_size": "vocab_size"}
    own = {names.get(key, key): value for key, value in config.items()}
    return own | {"rope_theta": 10000.0 * config["rope_ratio"], "partial_rotary_factor": 0.5}


def metadata(case: FamilyCase) -> dict[str, Any]:
    c = _usual_names(case.config)
    heads, kv_heads = c["num_attention_heads"], c.get("num_key_value_heads", c["num_attention_heads"])
    dim = c.get("head_dim", c["hidden_size"] // heads)
    share = {"phi": 0.5, "glm4": 0.5, "stablelm": 0.25}.get(c["model_type"], 1.0)
    share = c.get("partial_rotary_factor", c.get("rotary_pct", share))
    keys: dict[str, Any] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.dimension_count": int(dim * share),
        "rope.freq_base": float(
            c.get("rope_theta", c.get("rotary_emb_base", {"smollm3": 2e6, "mixtral": 1e6}.get(c["model_type"], 1e4)))
        ),
    }
    if "head_dim" in c:
        keys |= {"attention.key_length": dim, "attention.value_length": dim}
    layer_norms = {"phi": "layer_norm_eps", "starcoder2": "norm_epsilon", "gpt_neox": "layer_norm_eps"}
    layer_norms |= {
        "falcon": "layer_norm_epsilon",
        "cohere": "layer_norm_eps",
        "stablelm": "layer_norm_eps",
        "cohere2": "layer_norm_eps",
        "mpt": "layer_norm_epsilon",
    }
    if c["model_type"] in layer_norms:
        keys["attention.layer_norm_epsilon"] = float(c.get(layer_norms[c["model_type"]], 1e-5))
    else:
        small = dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "smollm3", "qwen2_moe", "qwen3_moe"), 1e-6)
        usual = (small | {"glm": 1.5625e-7, "glm4": 1.5625e-7}).get(c["model_type"], 1e-5)
        keys["attention.layer_norm_rms_epsilon"] = float(c.get("rms_norm_eps", usual))
    own = {"sliding_window": "attention.sliding_window", "attention_multiplier": "attention.scale"}
    own |= {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
    own |= {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    own |= {"num_local_experts": "expert_count", "num_experts": "expert_count"}
    own |= {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
    own |= {"logits_scaling": "logit_scale", "logit_scale": "logit_scale"}
    keys |= {new: c[old] for old, new in own.items() if old in c}
    if scaling := c.get("rope_scaling"):
        keys |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if "original_max_position_embeddings" in scaling:
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if c["model_type"] == "olmo3":
        table = c["rope_parameters"]["full_attention"]
        keys |= {"rope.freq_base": table["rope_theta"], "rope.scaling.type": "yarn"}
        keys |= {"rope.scaling.factor": table["factor"]}
        keys["rope.scaling.original_context_length"] = table["original_max_position_embeddings"]
        if "layer_types" in c:
            keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in c["layer_types"]]
    if c["model_type"] == "mpt":
        keys["attention.max_alibi_bias"] = 8.0
    if c["model_type"] == "gpt_oss":
        keys["expert_feed_forward_length"] = c["intermediate_size"]
    if "use_parallel_residual" in c:
        keys["use_parallel_residual"] = c["use_parallel_residual"]
    return {f"{ARCHITECTURES[c['model_type']]}.{key}": value for key, value in keys.items()}


def tokenizer_keys(count: int) -> dict[str, Any]:
    """A vocabulary of so many tokens: single bytes, and one of two."""
    known = gguf_files.metadata(gguf_files.case("llama_gqa"))
    keys = {key: value for key, value in known.items() if key.startswith("tokenizer.")}
    first, second, *rest = keys["tokenizer.ggml.tokens"][: count - 1]
    keys["tokenizer.ggml.tokens"] = [first, second, *rest, first + second]
    keys["tokenizer.ggml.token_type"] = [1] * count
    return keys | {"tokenizer.ggml.merges": [f"{first} {second}"], "tokenizer.ggml.eos_token_id": 2}


def write(case: FamilyCase, path: pathlib.Path, values: dict[str, np.ndarray], **more: Any) -> pathlib.Path:
    gguf_files.write(
        path,
        ARCHITECTURES[case.config["model_type"]],
        metadata(case) | tokenizer_keys(_usual_names(case.config)["vocab_size"]) | more,
        tensors(case, values),
    )
    return path
