"""Split GGUF files, and folders that hold a GGUF and nothing else of a model."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from support import gguf_files

from kvjax.checkpoints.gguf_parts import open_gguf, part_names
from kvjax.checkpoints.load import load, load_config
from kvjax.errors import UsageError, WeightsError

CASE = gguf_files.case("llama_gqa")
PARTS = 3


def write_parts(folder, name="m", parts=PARTS, **changes):
    """The model in parts, as llama.cpp's gguf-split writes it; ``changes`` are to the metadata of the second part."""
    folder.mkdir(exist_ok=True)
    tensors = list(gguf_files.gguf_tensors(CASE).items())
    for part in range(parts):
        keys = gguf_files.metadata(CASE) if part == 0 else {}
        keys |= {"split.no": part, "split.count": parts, "split.tensors.count": len(tensors)}
        keys |= {key.replace("_", "."): value for key, value in changes.items()} if part == 1 else {}
        path = folder / f"{name}-{part + 1:05}-of-{parts:05}.gguf"
        gguf_files.write(path, "llama", keys, dict(tensors[part::parts]))
    return folder


def test_names_of_parts():
    assert part_names("a-b-00002-of-00003.gguf") == [f"a-b-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for whole in ("m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf"):
        assert part_names(whole) == [whole]


@pytest.mark.parametrize("part", [1, 2, PARTS])
def test_any_part_loads_the_whole_model(tmp_path, part):
    folder = write_parts(tmp_path / "parts")
    whole = load(gguf_files.write_case(CASE, tmp_path / "whole.gguf"), dtype="float32", progress=False)
    ours = load(folder / f"m-0000{part}-of-0000{PARTS}.gguf", dtype="float32", progress=False)
    assert ours.config == whole.config and ours.stop_token_ids == whole.stop_token_ids
    for one, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_missing_part_is_named(tmp_path):
    folder = write_parts(tmp_path / "m")
    (folder / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(WeightsError, match=r"lacks m-00002-of-00003.gguf, a part of the model of 3 parts"):
        load(folder / "m-00001-of-00003.gguf", progress=False)
    with pytest.raises(WeightsError, match=r"lacks m-00002-of-00003.gguf"):
        load(folder, progress=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"split_no": 2}, r"by its name part 2 of 3, and says that it is number 2 of 3"),
        ({"split_count": 9}, r"by its name part 2 of 3, and says that it is number 1 of 9"),
        ({"split_no": "x"}, r"number 'x' of 3"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, changes, sentence):
    with pytest.raises(WeightsError, match=sentence):
        open_gguf(write_parts(tmp_path / "m", **changes) / "m-00001-of-00003.gguf")


def test_a_weight_in_two_parts_and_a_wrong_count_of_them(tmp_path):
    folder = write_parts(tmp_path / "m")
    first = {"split.no": 0, "split.count": 3, "split.tensors.count": 99}
    tensors = gguf_files.gguf_tensors(CASE)
    some = dict(list(tensors.items())[0::PARTS])
    path = folder / "m-00001-of-00003.gguf"
    gguf_files.write(path, "llama", gguf_files.metadata(CASE) | first, some)
    with pytest.raises(WeightsError, match=r"parts hold 99 weights \(split.tensors.count\); they hold 21"):
        open_gguf(path)
    gguf_files.write(path, "llama", gguf_files.metadata(CASE) | first, tensors)
    with pytest.raises(WeightsError, match=r"m-00002-of-00003.gguf sets the weight .*, which m-00001-of-00003.gguf"):
        open_gguf(path)


def test_a_part_under_another_name(tmp_path):
    folder = write_parts(tmp_path / "m")
    alone = shutil.copy(folder / "m-00001-of-00003.gguf", tmp_path / "renamed.gguf")
    with pytest.raises(WeightsError, match=r"is one of 3 parts of a model \(split.count\); give it the name"):
        load(alone, progress=False)


def test_a_folder_of_one_gguf(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_files.write_case(CASE, folder / "only.gguf")
    (folder / "README.md").write_text("# A model")
    assert load(folder, progress=False).config == load_config(folder) == load_config(folder / "only.gguf")
    assert load_config(write_parts(tmp_path / "parts")).num_layers == 2


def test_a_folder_of_several_ggufs_lists_them(tmp_path):
    folder = write_parts(tmp_path / "m")
    for name in ("b.gguf", "a.gguf"):
        gguf_files.write_case(CASE, folder / name)
    with pytest.raises(UsageError, match=r"holds several models; give the path of one of a.gguf, b.gguf, m-00001-of-"):
        load(folder, progress=False)
    for number in range(9):
        (folder / f"c{number}.gguf").touch()
    with pytest.raises(UsageError, match=r"c5.gguf and 4 more\.$"):
        load_config(folder)


def test_a_folder_of_safetensors_may_hold_a_gguf_too(tmp_path):
    folder = gguf_files.write_folder(CASE, tmp_path / "m")
    (folder / "broken.gguf").touch()
    assert load_config(folder).num_layers == 2
