"""Checkpoints of every family with one thing wrong: a sentence each, before a parameter is allocated where that can be.

What only the weights' own numbers show is said while they are read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import family_cases as cases
from support import gguf_files
from support.mutations import (
    AWQ,
    BLOCKS,
    GPTQ,
    INF,
    INT4,
    INT8,
    NAN,
    OWN,
    Q_PROJ,
    Edit,
    config,
    extra,
    file,
    header,
    index,
    last,
    named,
    number,
    packed,
    part,
    quantised_by,
    reshape,
    reshaped,
    sentence_of,
    sharded,
    tokenizer,
    weights,
    without,
)

from kvjax.checkpoints.families import FAMILIES

#: Cases with a byte-level tokenizer that has merges.
BYTES = {"llama": "llama_gqa", "bloom": "bloom_2_heads"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Callable[[str], Path]:
    """The checkpoint of a case, written once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name in made:
            return made[name]
        if name in BYTES:
            made[name] = gguf_files.write_folder(gguf_files.case(BYTES[name]), root / name)
        else:
            case, shapes = OWN.get(name) or (next(case for case in cases.CASES if case.name == name), None)
            tensors = cases.values(case, shapes() if shapes else cases.shapes(case))
            made[name] = cases.write_folder(case, root / name, tensors)
        return made[name]

    return folder


#: (case, what is wrong, part of the sentence)
BEFORE: list[tuple[str, Edit, str]] = [
    # configurations
    ("gemma", config(head_dim="12"), "'12' as its head_dim"),
    ("gemma", config(hidden_size=0), "0 as its hidden_size"),
    ("phi", config(partial_rotary_factor=-1), "an even number is needed"),
    ("phi_whole", config(num_attention_heads=2**70), "num_attention_heads"),
    ("phi3", config(rope_scaling={"type": "longrope", "short_factor": [1], "long_factor": [1]}), "rotary divisors"),
    ("phi3_long", config(rope_scaling={"type": "longrope", "short_factor": [NAN] * 3, "long_factor": [1] * 3}), "nan"),
    ("glm", config(num_hidden_layers=2**31), "2,147,483,648 layers"),
    ("glm4", config(head_dim=7), "an even number"),
    ("glm", config(head_dim=2**31), "4 heads of 2,147,483,648 channels, and its widest weight has 112"),
    ("cohere", config(hidden_size=2**31), "4 heads of 536,870,912 channels"),
    ("chatglm", config(num_attention_heads=2**33), "8,589,934,592 heads"),
    ("olmo2", config(rms_norm_eps="x"), "of the wrong kind"),
    ("granite", config(residual_multiplier=NAN), "residual_scale is nan"),
    ("granite_plain", config(logits_scaling=0), "division by zero"),
    ("starcoder2", config(norm_epsilon=-1), "rms_norm_eps is -1"),
    ("gpt_neox", config(rotary_pct=3), "an even number is needed"),
    ("falcon", config(num_attention_heads=0), "0 as its num_attention_heads"),
    ("falcon_new", config(num_kv_heads=3), "do not divide"),
    ("mpt", config(n_layers="two"), "'two' as its n_layers"),
    ("mpt", config(attn_config=[1]), "of the wrong kind"),
    ("cohere", config(logit_scale=0), "logit_scale is 0"),
    ("stablelm", config(num_key_value_heads=3), "do not divide"),
    ("smollm3", config(no_rope_layers=5), "no_rope_layers"),
    ("mistral_window", config(sliding_window=-5), "-5 as its sliding_window"),
    ("ministral", config(layer_types=["full_attention"]), "layer_types for other than its 2 layers"),
    ("qwen2_window", config(max_window_layers="x"), "max_window_layers is 'x'"),
    ("qwen3_window", config(num_hidden_layers=10**9), "1,000,000,000 layers"),
    ("mixtral", config(num_local_experts=2**38), "experts.count"),
    ("qwen2_moe", config(num_experts_per_tok=9), "9 of 4 experts"),
    ("qwen3_moe", config(mlp_only_layers="all"), "mlp_only_layers"),
    ("gpt_oss", config(swiglu_limit=0), "experts.limit is 0"),
    ("gpt_oss", config(swiglu_alpha=NAN), "experts.alpha is nan"),
    ("gpt_oss", config(num_local_experts="five"), "'five' as its num_local_experts"),
    ("gpt_oss", config(num_experts_per_tok=6), "6 of 5 experts"),
    ("gpt_oss", config(quantization_config={"quant_method": "gptq"}), "quantised by GPTQ to None bits"),
    ("llama", config(quantization_config={"quant_method": "bitsandbytes"}), "quantised by 'bitsandbytes'"),
    ("llama", config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}), "0 as its group_size"),
    ("gemma2", config(attn_logit_softcapping="high"), "of the wrong kind"),
    ("gemma3", config(sliding_window_pattern=-1), "-1 as its sliding_window_pattern"),
    ("olmo3", config(rope_parameters=[1]), "of the wrong kind"),
    ("cohere2", config(vocab_size=2**39), "with shape [48, 32]; its configuration asks for [549755813888, 32]"),
    ("chatglm", config(multi_query_group_num=3), "do not divide"),
    ("baichuan", config(num_attention_heads=5), "with shape"),
    ("bloom", config(num_attention_heads=5), "with shape|divide"),
    ("llama", config(max_position_embeddings=2**70), "max_position"),
    ("llama", config(intermediate_size=2**40), "with shape"),
    ("llama", config(model_type=[["llama"]]), "architecture"),
    ("llama", config(rope_theta=NAN), "nan as its rope_theta"),
    ("gemma3", file("config.json", b"[" * 90000), "is not JSON"),
    ("gemma3", file("config.json", b"\xff\xfe{}"), "is not JSON"),
    ("phi3", file("config.json", None), "config.json cannot be read"),
    # weights: missing, extra, of a wrong shape, integers
    ("gemma2", without("pre_feedforward_layernorm"), "lacks the weight"),
    ("mixtral", without("experts.4.w3"), "experts.4.w3.weight"),
    ("gpt_oss", without("sinks"), "lacks the weight 'model.layers.0.self_attn.sinks'"),
    ("gpt_oss", without("down_proj_bias"), "experts.down_proj_bias"),
    ("gpt_oss", packed(lambda tensors, name: tensors.pop(name + "_scales")), "_scales', a part of the weight"),
    ("gpt_oss", packed(lambda tensors, name: tensors.pop(name + "_blocks")), "_blocks', a part of the weight"),
    ("gpt_oss", packed(lambda tensors, name: tensors.update({name: np.ones(3, np.float32)})), "twice: in float"),
    ("gpt_oss", packed(lambda tensors, name: reshape(tensors, name + "_scales", (5, 1, 48))), "do not fit"),
    ("gpt_oss", packed(lambda tensors, name: reshape(tensors, name + "_blocks", (5, 48, 16))), "do not fit"),
    ("gpt_oss", packed(lambda tensors, name: reshape(tensors, name + "_blocks", (5, 48, 2, 8))), "do not fit"),
    ("gpt_oss", weights(lambda t: t.update({"model.norm.weight": np.ones(32, np.uint8)})), "as U8"),
    ("mixtral", weights(lambda t: t.update({"model.norm_blocks": np.ones(32, np.uint8)})), "a part of the weight"),
    ("cohere_plus", reshaped("q_norm"), "with shape [8, 4]; its configuration asks for [4, 8]"),
    ("stablelm_12b", without("q_layernorm.norms.3"), "q_layernorm.norms.3.weight"),
    ("stablelm_12b", config(qk_layernorm=False), "which a stablelm model does not have"),
    ("falcon_new", without("ln_mlp"), "ln_mlp"),
    ("olmo2", extra("model.layers.0.input_layernorm.weight"), "which a olmo2 model does not have"),
    ("qwen3_moe", extra("model.layers.9.mlp.gate.weight"), "model.layers.9.mlp.gate.weight"),
    ("stablelm", reshaped("up_proj"), "with shape"),
    ("gpt_neox", reshaped("query_key_value"), "with shape"),
    ("glm4", weights(lambda t: t.update({"model.norm.weight": np.ones((32, 1), np.float32)})), "[32, 1]"),
    ("phi", weights(lambda t: t.update({"model.final_layernorm.bias": np.ones(32, np.int8)})), "as I8"),
    ("starcoder2", weights(dict.clear), "2 layers and holds 0 weights"),
    # quantised tensors: parts that are missing, of another kind or shape, and descriptions that lie
    ("llama", quantised_by(GPTQ, part(".qzeros", None)), f"lacks '{Q_PROJ}.qzeros', a part of the weight"),
    ("llama", quantised_by(GPTQ, part(".scales", None)), f"lacks '{Q_PROJ}.scales', a part of the weight"),
    ("llama", quantised_by(GPTQ, part(".qweight", None)), f"lacks '{Q_PROJ}.qweight', a part of the weight"),
    ("llama", quantised_by(GPTQ, group_size=16), "groups of 16 of 32 inputs ask for [2, 32]"),
    ("llama", quantised_by(GPTQ, bits=8), "groups of 16 of 16 inputs ask for"),
    ("llama", quantised_by(GPTQ, part(".scales", np.ones((32, 1), np.float16))), "has shape [32, 1]"),
    ("llama", quantised_by(GPTQ, part(".qzeros", np.ones((1, 4), np.float32))), "as F32 in the place of I32 or U32"),
    ("llama", quantised_by(GPTQ, part(".qweight", np.ones(4, np.int32))), "qweight' has shape [4]"),
    ("llama", quantised_by(GPTQ, last(".g_idx", 1)), "names other groups than the 1 there are"),
    ("llama", quantised_by(GPTQ, last(".g_idx", -1)), "names other groups than the 1 there are"),
    ("llama", quantised_by(GPTQ, part(".g_idx", None), desc_act=True), "lacks 'model.layers.0.self_attn.q_proj.g_idx'"),
    ("llama", quantised_by(GPTQ, part(".weight", np.ones((32, 32), np.float32))), "twice: in float and quantised"),
    ("llama", quantised_by(GPTQ, part(".qweight", np.ones((5, 32), np.int32))), "of 40 inputs ask for"),
    ("llama", quantised_by(AWQ, part(".qzeros", np.ones((1, 3), np.int32))), "qzeros' has shape [1, 3]"),
    ("llama", quantised_by(INT8, part(".weight_scale", None)), "q_proj.weight_scale', a part of"),
    ("llama", quantised_by(INT8, part(".weight_scale", np.ones((31, 1), np.float32))), "has shape [31, 1]"),
    ("llama", quantised_by(INT8, config_groups=[1]), "compressed-tensors in the form 'int-quantized'"),
    ("llama", quantised_by(INT4, part(".weight_shape", np.array([32, 2**40]))), "weight_shape' says [32, 1,099"),
    ("llama", quantised_by(INT4, part(".weight_packed", np.ones((32, 9), np.int32))), "weight_shape' says [32, 32]"),
    ("llama", quantised_by(BLOCKS, weight_block_size=[16, 16]), "blocks of 16 x 16 ask for [2, 2]"),
    ("llama", quantised_by(BLOCKS, weight_block_size=[0, 16]), "[0, 16] as the size of its blocks"),
    ("llama", quantised_by(BLOCKS, part(".weight_scale_inv", None)), "q_proj.weight_scale', a part of"),
    ("llama", quantised_by(BLOCKS, part(".weight", None)), "lacks 'model.layers.0.self_attn.q_proj.weight', a part"),
    # safetensors: headers that lie
    ("granite", header(b"{}", 2**63), "truncated or corrupt"),
    ("granite", header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,999]}}'), "truncated or corrupt"),
    ("granite", header(b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,64]}}'), "corrupt"),
    ("granite", header(b'{"a":{"dtype":"Q9","shape":[4],"data_offsets":[0,64]}}'), "corrupt"),
    ("granite", header(b"[]"), "corrupt"),
    ("granite", file("model.safetensors", b""), "corrupt"),
    ("granite", file("model.safetensors", None), "holds no weights"),
    # indices
    ("cohere", index([1]), "no weight_map"),
    ("cohere", index([], whole=True), "holds no JSON object"),
    ("cohere", sharded({"model.more.weight": "model-00009.safetensors"}), "model-00009.safetensors cannot be read"),
    ("cohere", sharded({"model.more.weight": "model.safetensors"}), "lacks the weight 'model.more.weight'"),
    ("cohere", sharded({"model.norm.weight": "../../../../etc/passwd"}), "names a file outside"),
    ("cohere", sharded({"model.norm.weight": "\0"}), "names a file outside"),
    # tokenizers
    ("smollm3", file("tokenizer.json", "{"), "tokenizer in"),
    ("smollm3", file("tokenizer.json", "null"), "tokenizer in"),
    ("smollm3", file("tokenizer.json", b"\xff" * 40), "tokenizer in"),
    ("smollm3", tokenizer(lambda found: found["model"].update(vocab={"a": -1})), "tokenizer in"),
    ("smollm3", tokenizer(lambda found: found["model"]["vocab"].update(more=4_000_000_000)), "another model"),
    (
        "llama",
        tokenizer(lambda found: found["model"].update(merges=[["e", "h"], ["h", "e"]])),
        "tokenizer in",
    ),
    ("llama", tokenizer(lambda found: found["model"].update(merges=[["zz", "q"]])), "tokenizer in"),
    ("smollm3", file("tokenizer_config.json", [1]), "tokenizer in"),
    ("smollm3", file("tokenizer_config.json", {"chat_template": [1]}), "tokenizer in"),
    ("smollm3", lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "holds no tokenizer"),
]
#: What only the numbers show.
WHILE: list[tuple[str, Edit, str]] = [
    ("gemma3", number("q_norm", NAN), "q_norm.weight' holds what is no finite number"),
    ("mixtral", number("w2", INF), "holds what is no finite number"),
    ("gpt_oss", number("sinks", NAN), "sinks' holds what is no finite number"),
    (
        "gpt_oss",
        packed(lambda tensors, name: tensors[name + "_scales"].fill(255)),
        "gate_up_proj' holds what is no finite number",
    ),
    ("olmo3", number("k_proj", NAN, "float16"), "k_proj.weight' holds what is no finite number"),
    ("qwen2_window", number("embed_tokens", -INF, "bfloat16"), "no finite number"),
    ("bloom", number("query_key_value", NAN), "no finite number"),
    ("llama", quantised_by(GPTQ, last(".scales", NAN)), "q_proj.weight' holds what is no finite number"),
    ("llama", quantised_by(AWQ, last(".scales", INF)), "q_proj.weight' holds what is no finite number"),
    ("llama", quantised_by(INT4, last(".weight_scale", NAN)), "q_proj.weight' holds what is no finite number"),
    ("llama", quantised_by(BLOCKS, last(".weight", NAN)), "q_proj.weight' holds what is no finite number"),
    ("llama", quantised_by(BLOCKS, last(".weight_scale_inv", INF)), "q_proj.weight' holds what is no finite number"),
]


@pytest.mark.parametrize(("name", "edit", "part"), named(BEFORE))
def test_what_is_said_before_memory_is_allocated(folders, tmp_path, allocated, name, edit, part):
    folder = shutil.copytree(folders(name), tmp_path / "m")
    edit(folder)
    said = sentence_of(folder)
    assert any(piece in said for piece in part.split("|")), said
    assert not allocated


@pytest.mark.parametrize(("name", "edit", "part"), named(WHILE))
def test_what_is_said_while_weights_are_read(folders, tmp_path, name, edit, part):
    folder = shutil.copytree(folders(name), tmp_path / "m")
    edit(folder)
    assert part in sentence_of(folder)


def test_there_are_many_and_of_every_family(folders):
    assert len(BEFORE) + len(WHILE) >= 60
    tried = {json.loads((folders(name) / "config.json").read_text())["model_type"] for name, *_ in BEFORE + WHILE}
    assert (
        set(FAMILIES) - tried == {"gemma3", "qwen3"} - tried
    )  # qwen3's window, and the text of gemma3, stand for them
