"""GGUF files of every family with one thing wrong: a sentence each, before a parameter is allocated if that can be."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import family_cases as cases
from support import family_gguf, gguf_files
from support.mutations import INF, NAN, OWN, named, sentence_of


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
MPT_HEADS = "mpt.attention.head_count", "mpt.attention.head_count_kv"
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
    ("mpt", key("mpt.attention.clamp_kqv", 6.0), "clamp_kqv (6.0)"),
    ("mpt", key("mpt.attention.max_alibi_bias", 0.0), "learned positions or other slopes"),
    ("mpt", key("mpt.attention.max_alibi_bias", 16.0), "learned positions or other slopes"),
    ("mpt", key("mpt.attention.head_count_kv", 1), "shares keys among heads"),
    ("mpt", key("mpt.feed_forward_length", 2**31), "other than 4 times its width"),
    ("mpt", lambda keys, _: keys.update(dict.fromkeys(MPT_HEADS, 7)), "do not divide evenly"),
    ("glm", tensor("blk.1.attn_k.bias", None), "lacks the weight 'blk.1.attn_k.bias'"),
    ("phi3", tensor("rope_factors_long.weight", np.full(4, NAN, np.float32)), "rope_factors"),
    ("gemma2", key("tokenizer.ggml.tokens", ["a", "a"]), "lists a token twice"),
    ("gemma2", key("tokenizer.ggml.tokens", 5), "tokens is missing"),
    ("gemma2", key("tokenizer.ggml.model", "wordpiece"), "tokenizer of kind 'wordpiece'"),
    ("gemma2", key("tokenizer.ggml.merges", ["a  b"]), "merges do not fit"),
    ("gemma2", key("tokenizer.ggml.pre", ["gpt-2"]), "splits text as"),
    ("gemma2", key("split.count", 2**31), "parts of a model"),
    ("gemma2", key("general.alignment", 0), "alignment"),
]


@pytest.mark.parametrize(("name", "change", "part"), named(GGUF))
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
