"""Checkpoints of every family with one thing wrong: a sentence each, before a parameter is allocated where that can be.

What only the weights' own numbers show is said while they are read.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import family_cases as cases
from support import family_gguf, gguf_files, own_cases
from support import quantised_folders as quantised

from kvjax.checkpoints import fill
from kvjax.checkpoints.families import FAMILIES
from kvjax.checkpoints.load import load
from kvjax.errors import KvjaxError

NAN, INF = float("nan"), float("inf")
Edit = Callable[[Path], None]
OWN = {
    "chatglm": (own_cases.CHATGLM, own_cases.chatglm_shapes),
    "baichuan": (own_cases.ALIBI, own_cases.baichuan_shapes),
}
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


def config(**changes: Any) -> Edit:
    """Other values in config.json; None takes a key out."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        found = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return edit


def file(name: str, content: bytes | str | dict | list | None) -> Edit:
    """Another content of a file; None removes it."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            data = content if isinstance(content, (bytes, str)) else json.dumps(content)
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return edit


def weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Edit:
    """Other tensors."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors"
        )

    return edit


def without(part: str) -> Edit:
    return weights(lambda tensors: tensors.pop(next(name for name in tensors if part in name)))


def reshaped(part: str) -> Edit:
    def change(tensors):
        name = next(name for name in tensors if part in name and tensors[name].ndim == 2)
        tensors[name] = tensors[name].T

    return weights(change)


def packed(change: Callable[[dict[str, np.ndarray], str], Any]) -> Edit:
    """The first layer's gates in 4 bits, with a change."""
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def edit(tensors: dict[str, np.ndarray]) -> None:
        experts, hidden, inner = tensors.pop(name).shape
        tensors[name + "_blocks"] = np.ones((experts, inner, hidden // 32, 16), np.uint8)
        tensors[name + "_scales"] = np.full((experts, inner, hidden // 32), 127, np.uint8)
        change(tensors, name)

    return weights(edit)


#: A projection that :func:`quantised_by` quantises, without an end.
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantised_by(kind: quantised.Kind, change: Callable[[dict[str, np.ndarray]], Any] = dict, **described: Any) -> Edit:
    """One projection quantised, with a change of its parts, named by their ends, and of what is said of it."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        parts, _ = kind.pack(tensors.pop(f"{Q_PROJ}.weight"))
        change(parts)
        tensors |= {Q_PROJ + end: part for end, part in parts.items()}

    def both(folder: Path) -> None:
        weights(edit)(folder)
        config(quantization_config=dict(kind.described) | described)(folder)

    return both


def part(end: str, value: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    """Another part; None takes it away."""
    return lambda parts: parts.pop(end) if value is None else parts.update({end: value})


def last(end: str, value: Any) -> Callable[[dict[str, np.ndarray]], Any]:
    """Another last number of a part."""

    def change(parts: dict[str, np.ndarray]) -> None:
        parts[end] = parts[end].copy()
        parts[end].flat[-1] = value

    return change


GPTQ, AWQ, INT8, INT4, BLOCKS = (quantised.KINDS[name] for name in ("gptq", "awq", "int8", "int4", "fp8 in blocks"))


def reshape(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    tensors[name] = np.resize(tensors[name], shape)


def number(part: str, value: float, dtype: str = "float32") -> Edit:
    """A number that is none, in the last place of a tensor."""

    def change(tensors):
        name = next(name for name in tensors if part in name)
        tensors[name] = tensors[name].astype(np.dtype(dtype))
        tensors[name].flat[-1] = value

    return weights(change)


def extra(name: str) -> Edit:
    return weights(lambda tensors: tensors.update({name: np.ones((4, 4), np.float32)}))


def header(text: bytes, length: int | None = None) -> Edit:
    """A safetensors file of this header, with this as its length."""
    return file("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text + bytes(64))


def index(table: Any, whole: bool = False) -> Edit:
    return file("model.safetensors.index.json", table if whole else {"weight_map": table})


def sharded(table: dict[str, str]) -> Edit:
    """An index of the file that is there, with more in it."""

    def edit(folder: Path) -> None:
        index(dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors") | table)(folder)

    return edit


def tokenizer(change: Callable[[dict], Any]) -> Edit:
    def edit(folder: Path) -> None:
        found = json.loads((folder / "tokenizer.json").read_text())
        change(found)
        (folder / "tokenizer.json").write_text(json.dumps(found))

    return edit


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


def sentence_of(path: Path) -> str:
    with pytest.raises(KvjaxError) as caught:
        load(path, progress=False)
    said = str(caught.value)
    assert len(said) < 300 and not {"\n", "\0"} & set(said) and said.endswith("."), said
    return said


@pytest.fixture
def allocated(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the parameters that are allocated."""
    found, make = [], fill.aligned
    monkeypatch.setattr(fill, "aligned", lambda shape, dtype: found.append(shape) or make(shape, dtype))
    return found


def _named(listed):
    return [pytest.param(*item, id=f"{item[0]}-{number}") for number, item in enumerate(listed)]


@pytest.mark.parametrize(("name", "edit", "part"), _named(BEFORE))
def test_what_is_said_before_memory_is_allocated(folders, tmp_path, allocated, name, edit, part):
    folder = shutil.copytree(folders(name), tmp_path / "m")
    edit(folder)
    said = sentence_of(folder)
    assert any(piece in said for piece in part.split("|")), said
    assert not allocated


@pytest.mark.parametrize(("name", "edit", "part"), _named(WHILE))
def test_what_is_said_while_weights_are_read(folders, tmp_path, name, edit, part):
    folder = shutil.copytree(folders(name), tmp_path / "m")
    edit(folder)
    assert part in sentence_of(folder)


def test_there_are_many_and_of_every_family(folders):
    assert len(BEFORE) + len(WHILE) + len(GGUF) >= 60
    tried = {json.loads((folders(name) / "config.json").read_text())["model_type"] for name, *_ in BEFORE + WHILE}
    assert (
        set(FAMILIES) - tried == {"gemma3", "qwen3"} - tried
    )  # qwen3's window, and the text of gemma3, stand for them


# --- GGUF -------------------------------------------------------------------------------------------------------


def asked(name: str) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Architecture, metadata and tensors of a case as a GGUF has them."""
    found, shapes = OWN.get(name) or (next(case for case in cases.CASES if case.name == name), None)
    case = family_gguf.as_a_gguf_says(found)
    shapes = shapes() if shapes else cases.shapes(case)
    if name == "gemma3":
        shapes = family_gguf.with_layers(shapes, case.config["num_hidden_layers"])
    keys = family_gguf.metadata(case) | family_gguf.tokenizer_keys(cases.VOCAB)
    return (
        family_gguf.ARCHITECTURES[case.config["model_type"]],
        keys,
        family_gguf.tensors(case, cases.values(case, shapes)),
    )


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]


def key(name: str, value: Any) -> Change:
    return lambda keys, tensors: keys.pop(name) if value is None else keys.update({name: value})


def tensor(name: str, value: np.ndarray | None) -> Change:
    return lambda keys, tensors: tensors.pop(name) if value is None else tensors.update({name: value})


ONES = np.ones(32, np.float32)
GGUF: list[tuple[str, Change, str]] = [
    ("gemma", key("gemma.block_count", 2**31), "2,147,483,648 layers"),
    ("glm4", key("glm4.attention.head_count", 2**31), "2,147,483,648 heads of 8 channels"),
    ("gemma2", key("gemma2.attention.head_count", 0), "attention.head_count"),
    ("gemma2", key("gemma2.attn_logit_softcapping", NAN), "attention_soft_cap is nan"),
    ("gemma3", key("gemma3.attention.sliding_window", "x"), "corrupt|sliding_window"),
    ("phi", key("phi2.rope.dimension_count", 2**31), "rotary_dim"),
    ("phi3", key("phi3.embedding_length", "many"), "'many' as its phi3.embedding_length"),
    ("olmo2", key("olmo2.attention.layer_norm_rms_epsilon", None), "lacks the key"),
    ("granite", key("granite.residual_scale", INF), "residual_scale is inf"),
    ("starcoder2", key("starcoder2.attention.head_count_kv", 3), "do not divide"),
    ("cohere", key("command-r.feed_forward_length", 2**31), "with shape"),
    ("stablelm", key("stablelm.context_length", 0), "context_length"),
    ("gpt_neox", key("gptneox.vocab_size", 47), "belongs to another model|with shape"),
    ("glm4", tensor("blk.1.post_ffw_norm.weight", None), "lacks the weight"),
    ("stablelm", tensor("blk.0.attn_q_norm.weight", ONES), "lacks the weight|with shape [32]"),
    (
        "olmo3",
        key("olmo2.attention.sliding_window_pattern", [True]),
        "sliding_window_pattern for other than its layers",
    ),
    ("falcon_new", tensor("blk.1.attn_norm_2.weight", None), "blk.1.attn_norm_2.weight"),
    ("falcon", key("falcon.attention.head_count_kv", 3), "do not divide"),
    ("baichuan", key("baichuan.block_count", 2), "is a baichuan of 2 layers"),
    ("gpt_oss", key("gpt-oss.expert_count", None), "lacks the key gpt-oss.expert_count"),
    ("gpt_oss", tensor("blk.1.attn_sinks.weight", None), "blk.1.attn_sinks.weight"),
    ("gpt_oss", tensor("blk.1.ffn_gate_exps.bias", ONES), "with shape [32]"),
    ("granite", tensor("blk.0.attn_norm.weight", ONES[:31]), "with shape [31]"),
    ("phi3", tensor("rope_factors_long.weight", np.full(4, NAN, np.float32)), "rope_factors"),
    ("gemma2", key("tokenizer.ggml.tokens", ["a", "a"]), "lists a token twice"),
    ("gemma2", key("tokenizer.ggml.tokens", 5), "tokens is missing"),
    ("gemma2", key("tokenizer.ggml.model", "wordpiece"), "tokenizer of kind 'wordpiece'"),
    ("gemma2", key("tokenizer.ggml.merges", ["a  b"]), "merges do not fit"),
    ("gemma2", key("tokenizer.ggml.pre", ["gpt-2"]), "splits text as"),
    ("gemma2", key("split.count", 2**31), "parts of a model"),
    ("gemma2", key("general.alignment", 0), "alignment"),
]


@pytest.mark.parametrize(("name", "change", "part"), _named(GGUF))
def test_what_is_said_of_a_gguf_before_memory_is_allocated(tmp_path, allocated, name, change, part):
    architecture, keys, tensors = asked(name)
    change(keys, tensors)
    said = sentence_of(gguf_files.write(tmp_path / "m.gguf", architecture, keys, tensors))
    assert any(piece in said for piece in part.split("|")), said
    assert not allocated


@pytest.mark.parametrize(("place", "value"), [(0, NAN), (1, INF)], ids=["scale", "minimum"])
def test_a_scale_of_a_quantised_block_that_is_no_number(tmp_path, place, value):
    import gguf

    architecture, keys, tensors = asked("olmo2")
    name, kind = "blk.0.ffn_gate.weight", gguf.GGMLQuantizationType.Q4_1
    path = gguf_files.write(tmp_path / "m.gguf", architecture, keys, tensors, {name: kind})
    data, block = path.read_bytes(), gguf.quantize(tensors[name], kind).tobytes()
    at = data.index(block) + 20 * 5 + 2 * place
    path.write_bytes(data[:at] + struct.pack("<e", value) + data[at + 2 :])
    assert f"'{name}' holds what is no finite number" in sentence_of(path)
