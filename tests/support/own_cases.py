"""Cases of the families that transformers lacks: configurations, and names and shapes of their published tensors."""

from __future__ import annotations

from support import family_cases as cases

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
