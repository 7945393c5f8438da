"""Tiny random models of many families, written as their checkpoints are.

Names and shapes of tensors are those that the reference implementation saved (``tests/golden/families.json``, made by
``scripts/golden_families.py``); values come from NumPy's frozen ``RandomState`` stream, seeded by case and tensor.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
VOCAB = 48


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """A configuration, as its ``config.json`` has it, and the lengths (tokens) of the prompts it is asked."""

    name: str
    config: Mapping[str, Any]
    lengths: tuple[int, ...] = (5, 17, 40)

    def tokens(self, length: int) -> np.ndarray:
        """Token ids of the prompt of that length, int64 [length]."""
        return random(f"{self.name}/{length}").randint(0, VOCAB, size=length)


def random(key: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(key.encode()))


def _case(name: str, model_type: str, **config: Any) -> FamilyCase:
    base: dict[str, Any] = {"model_type": model_type, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    base |= {"pad_token_id": 0, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return FamilyCase(name, {key: value for key, value in (base | config).items() if value != "absent"})


_LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.6], "long_factor": [1.0, 1.7, 4.0]}
_MHA = {"num_key_value_heads": "absent"}

CASES: tuple[FamilyCase, ...] = (
    _case("gemma", "gemma", head_dim=12, num_key_value_heads=1, hidden_activation="gelu_pytorch_tanh"),
    _case("phi", "phi", rope_theta=500.0, partial_rotary_factor=0.5),
    _case("phi_whole", "phi", partial_rotary_factor=1.0, **_MHA),
    _case("phi3", "phi3", rope_theta=500.0, sliding_window=64),
    _case(
        "phi3_long", "phi3", rope_scaling=_LONG, partial_rotary_factor=0.75,
        original_max_position_embeddings=16, tie_word_embeddings=True,
    ),
    _case("glm", "glm", head_dim=12, partial_rotary_factor=0.5, rope_theta=500.0),
    _case("glm4", "glm4", head_dim=8, partial_rotary_factor=0.5, attention_bias=False),
    _case("olmo2", "olmo2", rope_theta=500.0),
    _case("olmo2_mha", "olmo2", **_MHA),
    _case(
        "granite", "granite", attention_multiplier=0.2, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=8.0, tie_word_embeddings=True,
    ),
    _case("granite_plain", "granite", attention_bias=True, mlp_bias=True),
    _case("starcoder2", "starcoder2", norm_epsilon=1e-3, use_bias=True),
    _case("starcoder2_plain", "starcoder2", use_bias=False, tie_word_embeddings=False),
    _case("gpt_neox", "gpt_neox", rotary_pct=0.25, rotary_emb_base=500, **_MHA),
    _case("gpt_neox_in_turn", "gpt_neox", use_parallel_residual=False, attention_bias=False, rotary_pct=1.0, **_MHA),
    _case("falcon", "falcon", multi_query=True, num_key_value_heads="absent", intermediate_size="absent"),
    _case(
        "falcon_new", "falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=40,
        num_key_value_heads="absent", intermediate_size="absent",
    ),
    _case(
        "falcon_one_norm", "falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
        num_key_value_heads="absent", intermediate_size="absent",
    ),
    _case(
        "falcon_in_turn", "falcon", multi_query=False, parallel_attn=False, tie_word_embeddings=False,
        num_key_value_heads="absent", intermediate_size="absent",
    ),
    FamilyCase(
        "mpt",
        {
            "model_type": "mpt", "vocab_size": VOCAB, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64,
            "expansion_ratio": 4, "no_bias": True, "attn_config": {"alibi": True, "attn_impl": "torch"},
        },
    ),
    _case("cohere", "cohere", rope_theta=500.0, logit_scale=0.25),
    _case("cohere_plus", "cohere", rope_theta=500.0, logit_scale=0.25, use_qk_norm=True),
    _case(
        "gpt_oss", "gpt_oss", head_dim=12, num_hidden_layers=3, sliding_window=8, intermediate_size=24,
        num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.7, rope_theta=500.0, attention_bias=True,
        rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
    ),
    _case("stablelm", "stablelm", use_qkv_bias=True, partial_rotary_factor=0.25),
    _case("stablelm_parallel", "stablelm", use_parallel_residual=True, partial_rotary_factor=0.5),
    _case(
        "stablelm_12b", "stablelm", use_parallel_residual=True, qk_layernorm=True, partial_rotary_factor=0.25,
        use_qkv_bias=False,
    ),
    _case("smollm3", "smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], rope_theta=500.0),
    _case("smollm3_every_fourth", "smollm3", num_hidden_layers=5, tie_word_embeddings=False),
    _case(
        "qwen2_no_window_layers", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2,
    ),
    _case("mistral_idle_window", "mistral", sliding_window=64),
    _case("mistral_window", "mistral", sliding_window=8),
    _case("ministral", "ministral", head_dim=12, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    _case("qwen2_window", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    _case(
        "qwen3_window", "qwen3", head_dim=12, use_sliding_window=True, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _case("phi3_window", "phi3", rope_theta=500.0, sliding_window=9),
    _case("starcoder2_window", "starcoder2", sliding_window=12),
    _case("mixtral", "mixtral", num_local_experts=5, num_experts_per_tok=2, intermediate_size=24),
    _case(
        "qwen2_moe", "qwen2_moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, num_hidden_layers=3, mlp_only_layers=[1],
    ),
    _case(
        "qwen3_moe", "qwen3_moe", num_experts=16, num_experts_per_tok=3, moe_intermediate_size=16, head_dim=12,
        norm_topk_prob=True, decoder_sparse_step=2,
    ),
    _case(
        "gemma2", "gemma2", head_dim=12, num_hidden_layers=3, sliding_window=8, query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0, final_logit_softcapping=2.0,
    ),
    _case(
        "gemma3", "gemma3_text", head_dim=12, num_hidden_layers=4, sliding_window=8, sliding_window_pattern=3,
        query_pre_attn_scalar=16, rope_theta=5000.0, rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0}, num_key_value_heads=1,
    ),
    _case("cohere2", "cohere2", num_hidden_layers=4, sliding_window=8, sliding_window_pattern=2, logit_scale=0.25),
    _case(
        "olmo3", "olmo3", num_hidden_layers=4, sliding_window=8,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "attention_factor": 1.2,
            },
        },
    ),
)  # fmt: skip


def shapes(case: FamilyCase) -> dict[str, list[int]]:
    """The tensors of the case's checkpoint, as the reference implementation saved them."""
    return json.loads((GOLDEN / "families.json").read_text())[case.name]


def values(case: FamilyCase, wanted: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """Random tensors of these names and shapes, float32."""
    return {name: _tensor(f"{case.name}/{name}", shape) for name, shape in wanted.items()}


def _tensor(key: str, shape: list[int]) -> np.ndarray:
    numbers = random(key).standard_normal(shape)
    if len(shape) == 1:
        numbers = numbers * 0.3 + (1 if key.endswith(".weight") else 0)
    else:
        # Large queries and keys make attention peaked, so that a wrong rotation cannot average away.
        peaked = any(part in key for part in ("q_proj", "k_proj", "qkv", "W_pack", "query_key_value"))
        numbers = numbers * shape[1] ** -0.5 * (2 if peaked else 1)
    return numbers.astype(np.float32)


def write_folder(case: FamilyCase, folder: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Write a model folder (config, weights, a tokenizer of one word an id); return it."""
    import tokenizers
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.config)))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, VOCAB))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
