"""Converted models: what loads from one is what loads from the original, it is whole or refused, and read in parts."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import family_cases as cases
from support import gguf_files, hostile

import kvjax
from kvjax.checkpoints import convert as converting
from kvjax.checkpoints import converted, converted_weights
from kvjax.cli.main import main
from kvjax.errors import KvjaxError, UsageError, WeightsError
from kvjax.fit import fit
from kvjax.saving.description import model_identity

CASES = {case.name: case for case in cases.CASES}


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A llama with a byte-level tokenizer, a chat template and stop tokens."""
    folder = tmp_path_factory.mktemp("original") / "m"
    return gguf_files.write_folder(gguf_files.case("llama_gqa"), folder, template=True)


@pytest.fixture(scope="module")
def int8(original, tmp_path_factory) -> Path:
    """The same in int8, in chunks of 256 bytes, so that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converting, "CHUNK", 256)
        return kvjax.convert(original, tmp_path_factory.mktemp("converted") / "m", weights="int8", progress=False)


def load(path: Path, **options) -> kvjax.LanguageModel:
    return kvjax.load(path, progress=False, compile_cache=False, **options)


def assert_same(one: kvjax.LanguageModel, other: kvjax.LanguageModel) -> None:
    assert one.config == other.config and one.stop_token_ids == other.stop_token_ids
    assert jax.tree.structure(one.params) == jax.tree.structure(other.params)
    for mine, its in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *itertools.product(
            ["gpt_oss", "gemma3", "falcon_new", "qwen2_moe", "phi3_long", "cohere_plus"], [None, "int8"]
        ),
        ("qwen2_moe", "fp8"),
    ],
)
def test_every_parameter_is_the_originals(name, weights, tmp_path):
    """Experts, windows with a rotary embedding of their own, layer norms, long factors of rotation, tied tables."""
    folder = cases.write_folder(CASES[name], tmp_path / "m", cases.values(CASES[name], cases.shapes(CASES[name])))
    out = kvjax.convert(folder, tmp_path / "out", weights=weights, dtype="float32", progress=False)
    assert_same(load(out, dtype="float32"), load(folder, weights=weights, dtype="float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_of_float32_it_loads_in_any_dtype_as_the_original(original, tmp_path, weights, dtype):
    out = kvjax.convert(original, tmp_path / "out", weights=weights, dtype="float32", progress=False)
    assert_same(load(out, dtype=dtype), load(original, weights=weights, dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_stored_as_asked(original, tmp_path, dtype):
    out = kvjax.convert(original, tmp_path / "out", dtype=dtype, progress=False)
    assert {array.dtype for array in converted.read_description(out).arrays.values()} == {dtype}
    assert_same(load(out, dtype=dtype), load(original, dtype=dtype))
    again = kvjax.convert(out, tmp_path / "again", dtype=dtype, progress=False)
    assert_same(load(again, dtype=dtype), load(out, dtype=dtype))


def test_the_tokenizer_and_its_template_come_along(original, int8):
    one, other = load(original, weights="int8").tokenizer, load(int8).tokenizer
    messages = [{"role": "user", "content": "hello <tool> there"}]
    assert other.has_chat_template and other.render(messages) == one.render(messages)
    for text in ("hello  world <|im_end|><tool>", "naïve 🙂 \n\t", ""):
        assert other.encode(text) == one.encode(text) and other.prefix_ids == one.prefix_ids
        assert other.decode(other.encode(text), skip_special_tokens=False) == text
    assert other.special_ids == one.special_ids and other.vocab_size == one.vocab_size
    assert other.special_tokens == one.special_tokens and other.token_bytes() == one.token_bytes()


@pytest.mark.slow
def test_a_conversation_of_the_original_goes_on_with_it(original, int8, tmp_path):
    first, second = load(original, weights="int8"), load(int8)
    assert {**model_identity(first), "name": ""} == {**model_identity(second), "name": ""}
    cache = kvjax.read(first, "hello there, hello", policy="lagkv:ratio=0.5,lag=4,sink=2")
    kvjax.save_cache(tmp_path / "talk", cache, first)
    answers = [
        kvjax.generate(lm, "hello", cache=kvjax.load_cache(tmp_path / "talk", lm), max_new_tokens=4, logprobs=True)
        for lm in (first, second)
    ]
    assert answers[0].tokens == answers[1].tokens and answers[0].logprobs == answers[1].logprobs
    with pytest.raises(UsageError, match="weights=None"):
        kvjax.load_cache(tmp_path / "talk", load(original))


def test_plans_read_the_description_alone(original, int8, tmp_path, capsys):
    alone = tmp_path / "m"
    alone.mkdir()
    shutil.copy(int8 / converted.DESCRIPTION, alone)
    request = {"prompt_tokens": 20, "max_new_tokens": 8, "dtype": "float32"}
    plans = [kvjax.plan(kvjax.load_config(path), **request) for path in (alone, int8)]
    assert plans[0] == plans[1] == kvjax.plan(kvjax.load_config(original), weights="int8", **request)
    assert main(["plan", "--model", str(alone), "--prompt-tokens", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == plans[0].weights_bytes
    # No other weights are in the folder, and so none are in the table.
    assert {row.weights for row in fit(kvjax.load_config(alone), device="v5e", prompt_tokens=20)} == {"int8"}
    assert main(["plan", "--model", str(alone), "--prompt-tokens", "20", "--fit", "--device", "t4", "--json"]) == 0
    assert {row["weights"] for row in json.loads(capsys.readouterr().out)} == {"int8"}


def test_other_weights_are_refused(int8, original, tmp_path, capsys):
    assert load(int8, weights="int8").config.weights == "int8"
    floats = kvjax.convert(original, tmp_path / "floats", dtype="float32", progress=False)
    with pytest.raises(UsageError, match="was converted with float weights; load it without weights='int8'"):
        load(floats, weights="int8")
    # A plan of what cannot be loaded would be of nothing.
    words = ["plan", "--model", str(floats), "--prompt-tokens", "20"]
    for more in ([], ["--fit", "--device", "t4"]):
        assert main([*words, *more, "--weights", "int8"]) == 2
        assert "was converted with float weights; leave --weights out" in capsys.readouterr().err
    assert main([*words, "--fit", "--device", "t4", "--json"]) == 0
    assert {row["weights"] for row in json.loads(capsys.readouterr().out)} == {"float32"}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_reads_the_weights(int8):
    from orbax.checkpoint import v1 as ocp

    lm = load(int8)
    found = ocp.load_checkpointables(int8.absolute() / converted.WEIGHTS)[converted.PARAMETERS]
    named = dict(zip(converted_weights.leaf_names(lm.params), jax.tree.leaves(lm.params), strict=True))
    assert found.keys() == named.keys()
    for name, leaf in named.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_a_part_is_read_from_the_chunks_that_it_touches_and_no_others(int8, monkeypatch):
    """A host of a pod reads what its devices hold."""
    name = "layers.0.gate_up.values"
    stored = converted.read_description(int8).arrays[name]
    rows, columns = stored.shape
    assert stored.grid == (7, 2)
    whole = np.asarray(load(int8).params.layers[0].gate_up[...].values)
    seen, path = [], converted_weights.chunk_path
    monkeypatch.setattr(converted_weights, "chunk_path", lambda *given: seen.append(given[2]) or path(*given))
    for region, chunks in (
        (((0, rows // 4), (0, columns)), 4),
        (((0, rows), (columns // 2, columns)), 7),
        (((3, 9), (5, 6)), 1),
    ):
        part = converted_weights._region(int8, name, stored, region, np.dtype("int8"))
        (top, bottom), (left, right) = region
        np.testing.assert_array_equal(part, whole[top:bottom, left:right])
        assert len(seen) == len(set(seen)) == chunks
        seen.clear()


# --- writing ----------------------------------------------------------------------------------------------------


def test_the_command(original, tmp_path, capsys):
    out = tmp_path / "new" / "m"
    assert main(["convert", str(original), "--weights", "int8", "--dtype", "float32", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert_same(load(out), load(original, weights="int8"))
    assert main(["convert", str(original), "--out", str(out)]) == 2
    assert "is not empty; name a folder that does not exist" in capsys.readouterr().err
    assert main(["convert", str(original), "--weights", "int3", "--out", str(tmp_path / "x")]) == 2
    assert [path.name for path in out.parent.iterdir()] == ["m"]


@pytest.mark.parametrize("out", ["gs://bucket/m", "\0", "x" * 300])
def test_where_nothing_can_be_written(original, out):
    with pytest.raises(UsageError):
        kvjax.convert(original, out, progress=False)


def test_a_link_to_where_it_goes(original, tmp_path):
    (tmp_path / "disk").mkdir()
    for name, there in (("empty", tmp_path / "disk"), ("none", tmp_path / "other")):
        (tmp_path / name).symlink_to(there)
        out = kvjax.convert(original, tmp_path / name, progress=False)
        assert out.is_symlink() and load(there).config == load(out).config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "empty", "none", "other"]


def test_a_file_in_the_way(original, tmp_path):
    (tmp_path / "m").write_text("")
    for out in ("m", "m/x"):
        with pytest.raises(KvjaxError, match="cannot be made"):
            kvjax.convert(original, tmp_path / out, progress=False)


def test_a_disk_without_room_is_said_before_a_weight_is_read(original, tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "load", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(KvjaxError, match=r"would take .* kB, and its disk has 1,?0*.*free"):
        kvjax.convert(original, tmp_path / "m", progress=False)
    assert not list(tmp_path.iterdir())


# Orbax's threads go on for a moment after their loop was closed, and Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_is_full_leaves_nothing(original, tmp_path):
    """A limit on the size of files fails writes as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(KvjaxError, match=r"cannot be written to .*: the disk is full\.") as caught:
            kvjax.convert(original, tmp_path / "m", dtype="float32", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_ctrl_c_while_it_is_written_leaves_nothing(original, tmp_path, monkeypatch):
    save = converting._save

    def slowly(*given):
        save(*given)
        threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT)).start()
        time.sleep(1.5)  # what is being written goes on, and a busy machine may be late

    monkeypatch.setattr(converting, "_save", slowly)
    with pytest.raises(KeyboardInterrupt):
        kvjax.convert(original, tmp_path / "m", progress=False)
    assert not list(tmp_path.iterdir())


def test_what_was_killed_is_removed_by_the_next(original, tmp_path):
    import os

    left, young = (tmp_path / f".m.kvjax-{name}" for name in ("0", "1"))
    for folder in (left, young):
        folder.mkdir()
    os.utime(left, (1, 1))
    kvjax.convert(original, tmp_path / "m", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.kvjax-1", "m"]


def test_progress_is_told(original, tmp_path):
    events = []
    kvjax.convert(original, tmp_path / "m", progress=events.append)
    saved = [event for event in events if event.stage == "save"]
    assert saved[-1].finished and saved[0].total > 0 and str(saved[0]).startswith("saving ")
    events.clear()
    kvjax.load(tmp_path / "m", progress=events.append, compile_cache=False)
    assert events[-1].stage == "load" and events[-1].done == events[-1].total


# --- damage -----------------------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(KvjaxError) as caught:
        load(folder)
    said = str(caught.value)
    assert len(said) <= 300 and not {"\n", "\0"} & set(said) and said.endswith("."), said
    return said


def test_files_that_are_missing_truncated_or_changed(int8, tmp_path):
    """Every file of the folder itself and of Orbax's, and of the arrays some chunks and their descriptions."""
    draw = random.Random(5)
    names = sorted(path.relative_to(int8) for path in int8.rglob("*") if path.is_file())
    own = [name for name in names if len(name.parts) <= 3]
    assert len(own) >= 7 and {"zarr.json", "0"} <= {name.name for name in names}
    folder = shutil.copytree(int8, tmp_path / "m")
    for name in [*own, *draw.sample(sorted(set(names) - set(own)), 10)]:
        content = (folder / name).read_bytes()
        place = draw.randrange(len(content)) if content else 0
        changed = (
            content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]
            if content
            else b"x"
        )
        (folder / name).unlink()
        assert "is damaged" in refused(folder), name
        if name.name == "tokenizer.json":
            os.mkfifo(folder / name)
            assert "is no file" in refused(folder), "a pipe is not waited for"
            (folder / name).unlink()
        for other in {content[:-1], content + b"\0", changed} - {content}:
            (folder / name).write_bytes(other)
            said = refused(folder)
            assert "is damaged" in said or "corrupt" in said or "does not describe" in said, (name, place)
        (folder / name).write_bytes(content)
    load(folder)


def lie(folder: Path, change) -> None:
    """Another description, with a digest that is right."""
    path = folder / converted.DESCRIPTION
    found = json.loads(path.read_text())
    del found["sha256"]
    change(found)
    path.write_text(json.dumps(found | {"sha256": converted._digest(found)}))


ARRAY = "layers.0.gate_up.values"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda found: found.update(version=2), "in version 2 of the form; this one reads up to version 1"),
        (lambda found: found.update(version="x"), "describes a model that cannot be"),
        (lambda found: found.update(kind="kvjax cache"), "does not describe a converted model"),
        (lambda found: found.update(stop_token_ids=[10**12]), "contradicts itself about 'stop_token_ids'"),
        (lambda found: found.update(stop_token_ids=[-1]), "contradicts itself about 'stop_token_ids'"),
        (lambda found: found["config"].update(num_layers=2**40), "its configuration|layers"),
        (lambda found: found["config"].update(num_layers=1), "holds 'layers.1"),
        (lambda found: found["config"].update(num_heads=2**20), "1,048,576 heads"),
        (lambda found: found["config"].update(vocab_size=2**39), "its model has"),
        (lambda found: found["config"].update(num_kv_heads=3), "4 query heads do not divide into 3"),
        (lambda found: found["config"].update(weights=None), "it lacks"),
        (lambda found: found["config"].update(qkv_bias=True), "it lacks 'layers.0.qkv_bias"),
        (lambda found: found["config"].update(head_dim="8"), "describes a model that cannot be"),
        (lambda found: found["config"].update(rope=[1]), "describes a model that cannot be"),
        (lambda found: found["arrays"].pop(ARRAY), f"it lacks '{ARRAY}'"),
        (lambda found: found["arrays"].update(more=found["arrays"][ARRAY]), "contradicts itself|does not have"),
        (lambda found: found["arrays"][ARRAY].update(shape=[2**20, 2**20]), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY].update(shape=[]), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY].update(shape=[-1, 32]), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY].update(chunk=[0, 1]), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY].update(dtype="float9"), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY].update(dtype="uint8"), "is uint8"),
        (lambda found: found["arrays"][ARRAY].update(crc32=[]), "contradicts itself"),
        (lambda found: found["arrays"][ARRAY]["crc32"].reverse(), "were changed"),
        (lambda found: found["files"].update({"../../etc/passwd": {"bytes": 1, "sha256": None}}), "contradicts itself"),
        (lambda found: found["files"].update({"/etc/passwd": {"bytes": 1, "sha256": None}}), "contradicts itself"),
        (lambda found: found["files"].pop("tokenizer.json"), "contradicts itself"),
        (lambda found: found["files"].update(more={"bytes": 1, "sha256": None}), "more cannot be read"),
        (lambda found: found.pop("stop_token_ids"), "describes a model that cannot be"),
    ],
)
def test_descriptions_that_lie(int8, tmp_path, monkeypatch, change, part):
    folder = shutil.copytree(int8, tmp_path / "m")
    lie(folder, change)
    allocated = []
    make = converted_weights.aligned
    monkeypatch.setattr(converted_weights, "aligned", lambda *given: allocated.append(given) or make(*given))
    said = refused(folder)
    assert any(piece in said for piece in part.split("|")), said
    assert not allocated or "were changed" in part


def test_any_lie_is_a_sentence_or_the_same_model(int8, tmp_path):
    draw = random.Random(11)
    folder = shutil.copytree(int8, tmp_path / "m")
    path = folder / converted.DESCRIPTION
    found, said = json.loads(path.read_text()), 0
    del found["sha256"]
    for _ in range(80):
        lied = hostile.changed(found, draw)
        digest = {"sha256": converted._digest(lied)} if isinstance(lied, dict) else None
        path.write_text(json.dumps(lied | digest if digest else lied))
        try:
            load(folder)
        except KvjaxError as error:
            assert len(str(error)) <= 300 and "\n" not in str(error)
            said += 1
    assert 40 < said < 80


def test_numbers_that_are_none(original, tmp_path):
    out = kvjax.convert(original, tmp_path / "m", dtype="float32", progress=False)
    name = "layers.0.down"
    path = converted_weights.chunk_path(out, name, (0, 0))
    content = bytearray(path.read_bytes())
    content[:4] = np.float32(np.nan).tobytes()
    path.write_bytes(content)
    assert f"numbers of '{name}' were changed" in refused(out)
    lie(out, lambda found: found["arrays"][name].update(crc32=[zlib.crc32(content)]))
    assert f"'{name}' holds what is no finite number" in refused(out)
    with pytest.raises(WeightsError, match="no finite number"):
        load(out, dtype="bfloat16")


def test_numbers_beyond_float16(tmp_path):
    case = CASES["olmo2"]
    tensors = cases.values(case, cases.shapes(case))
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e6
    folder = cases.write_folder(case, tmp_path / "m", tensors)
    out = kvjax.convert(folder, tmp_path / "out", dtype="float32", progress=False)
    with pytest.raises(WeightsError, match="beyond float16's 65,504"):
        load(out, dtype="float16")
