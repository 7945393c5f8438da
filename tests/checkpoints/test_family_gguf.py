"""Families from GGUF files, as llama.cpp's converter writes them, are what they are from safetensors."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import numpy as np
import pytest
from support import family_cases as cases
from support import family_gguf, gguf_files
from support.own_cases import ALIBI, CHATGLM, ROTARY, baichuan_shapes, chatglm_shapes

from kvjax.checkpoints.load import load

#: llama.cpp tells which of them have ALiBi by their number of layers.
BAICHUAN = [
    dataclasses.replace(case, config={**case.config, "num_hidden_layers": layers})
    for case, layers in ((ROTARY, 32), (ALIBI, 40))
]
#: Those that have what a GGUF can say: not every fourth layer by a list, no window of starcoder2's; longrope needs
#: tensors of its own.
ASKED = [
    family_gguf.as_a_gguf_says(case)
    for case in (*cases.CASES, CHATGLM, *BAICHUAN)
    if case.config["model_type"] in family_gguf.ARCHITECTURES
    and case.name not in ("smollm3", "phi3_long", "granite_plain", "starcoder2_window", "falcon_in_turn")
]
#: Cases whose every layer is like one of the golden ones.
LIKE = {"baichuan_7b": 0, "baichuan_13b": 0, "gemma3": 0, "cohere2": 0, "qwen2_moe": 0, "qwen3_moe": 1}


@pytest.mark.parametrize("case", ASKED, ids=lambda case: case.name)
def test_gguf_equals_safetensors(case, tmp_path):
    own = {"chatglm": chatglm_shapes, "baichuan_7b": baichuan_shapes, "baichuan_13b": baichuan_shapes}
    shapes = own[case.name]() if case.name in own else cases.shapes(case)
    if case.name in LIKE:
        shapes = family_gguf.with_layers(shapes, case.config["num_hidden_layers"], LIKE[case.name])
    tensors = cases.values(case, shapes)
    ours = load(family_gguf.write(case, tmp_path / "m.gguf", tensors), dtype="float32", progress=False)
    theirs = load(cases.write_folder(case, tmp_path / "m", tensors), dtype="float32", progress=False)
    differing = {
        name: (value, getattr(theirs.config, name))
        for name, value in vars(ours.config).items()
        if value != getattr(theirs.config, name)
    }
    # A GGUF keeps its numbers in float32.
    for name, (one, other) in differing.items():
        assert name == "rms_norm_eps" or name.endswith(("_scale", "_multiplier")), differing
        assert one == pytest.approx(other, rel=1e-6)
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("weights", [None, "int8", "file"])
def test_a_tensor_for_each_expert_as_the_first_files_of_mixtral_have(weights, tmp_path):
    """``blk.0.ffn_up.3.weight``: llama.cpp wrote them so until March 2024."""
    case = next(case for case in ASKED if case.name == "mixtral")
    case = dataclasses.replace(case, config={**case.config, "intermediate_size": 64, "hidden_size": 64})
    wider = {24: 64, 32: 64, 16: 32}
    shapes = {name: [wider.get(size, size) for size in shape] for name, shape in cases.shapes(case).items()}
    together = family_gguf.tensors(case, cases.values(case, shapes))
    divided = {}
    for name, tensor in together.items():
        stem, mark, end = name.partition("_exps.")
        divided |= {f"{stem}.{i}.{end}": one for i, one in enumerate(tensor)} if mark else {name: tensor}
    assert len(divided) - len(together) == 2 * 3 * 4, "two layers, three projections, five experts"
    keys = family_gguf.metadata(case) | family_gguf.tokenizer_keys(cases.VOCAB)
    keys.pop("llama.expert_feed_forward_length", None)
    found = []
    for file, tensors in (("one", together), ("each", divided)):
        kinds = {name: gguf.GGMLQuantizationType.Q8_0 for name in tensors if ".ffn_" in name and "inp" not in name}
        kinds = {name: kind for name, kind in kinds.items() if "norm" not in name and weights == "file"}
        path = gguf_files.write(tmp_path / f"{file}.gguf", "llama", keys, tensors, kinds)
        found.append(load(path, dtype="float32", weights=weights, progress=False))
    assert found[0].config == found[1].config and bool(found[0].config.kept) == (weights == "file")
    jax.tree.map(np.testing.assert_array_equal, found[0].params, found[1].params)


def test_layers_with_windows_may_be_listed(tmp_path):
    case = next(case for case in ASKED if case.name == "olmo3")
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    case = dataclasses.replace(case, config={**case.config, "layer_types": kinds})
    path = family_gguf.write(case, tmp_path / "m.gguf", cases.values(case, cases.shapes(case)))
    assert load(path, dtype="float32", progress=False).config.windows == (None, 8, 8, None)


def test_a_starcoder2_has_the_window_that_its_file_gives(tmp_path):
    """llama.cpp's converter gives none, and its models see everything; other converters do."""
    case = family_gguf.as_a_gguf_says(next(case for case in cases.CASES if case.name == "starcoder2_plain"))
    path = family_gguf.write(case, tmp_path / "m.gguf", cases.values(case, cases.shapes(case)))
    assert load(path, dtype="float32", progress=False).config.windows == ()
    given = {"starcoder2.attention.sliding_window": 8}
    path = family_gguf.write(case, tmp_path / "w.gguf", cases.values(case, cases.shapes(case)), **given)
    assert set(load(path, dtype="float32", progress=False).config.windows) == {8}


def test_every_architecture_is_asked():
    assert {case.config["model_type"] for case in ASKED} == set(family_gguf.ARCHITECTURES)
