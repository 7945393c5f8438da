"""Accelerators by name, and the table of what fits on one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import toys

import kvjax
from kvjax import fit as fits
from kvjax.chips import CHIPS, chip
from kvjax.cli.main import main
from kvjax.errors import DoesNotFit, UsageError
from kvjax.tables import human_bytes

CONFIG = toys.tiny_config(max_position=8192)
REQUEST = {"prompt_tokens": 4000, "max_new_tokens": 16}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)


def test_jax_takes_a_part_of_a_gpu_and_all_of_a_tpu(monkeypatch):
    assert chip("T4").limit == int(14.6 * 2**30 * 0.75) and chip("v5e").limit == CHIPS["v5e"].memory
    planned = kvjax.plan(CONFIG, device="t4", **REQUEST)
    assert planned.memory_limit == chip("t4").limit and "NVIDIA T4, JAX reserves 75%" in str(planned)
    assert "TPU v5e, all of which JAX may take" in str(kvjax.plan(CONFIG, device="v5e", **REQUEST))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert chip("t4").limit == int(14.6 * 2**30 * 0.9)


@pytest.mark.parametrize("text", ["abc", "0", "nan", "-1", "1_0"])
def test_a_part_of_a_gpu_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
    with pytest.raises(kvjax.UsageError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION is '{text}'; give a number above 0"):
        kvjax.plan(CONFIG, device="t4", **REQUEST)


@pytest.mark.parametrize("mesh", [None, "model=2"])
def test_pages_are_the_devices_own(mesh):
    """A TPU pads heads of 80 channels to its 128 lanes, whatever machine plans for it."""
    config = dataclasses.replace(CONFIG, head_dim=80)
    tpu, gpu = (kvjax.plan(config, device=name, mesh=mesh, **REQUEST) for name in ("v5e", "l4"))
    assert tpu.cache_bytes / gpu.cache_bytes == pytest.approx(128 / 80, rel=0.05)


def test_a_refusal_lacks_what_the_sentence_says(monkeypatch):
    """Of a batch that is no bucket what is refused is the exact allocation, and the row is about that one."""
    small(monkeypatch, kvjax.plan(CONFIG, dtype="bfloat16", device="v5p", **REQUEST | {"batch": 5}).total_bytes // 2)
    row, *_ = fits.fit(CONFIG, device="v5e", policies=["full"], **REQUEST | {"batch": 5})
    assert not row.fits and f"needs {human_bytes(row.plan.total_bytes)} " in row.refusal


def test_the_dtype_that_a_chip_multiplies():
    assert chip("t4").dtype == "float32" and {chip(name).dtype for name in set(CHIPS) - {"t4"}} == {"bfloat16"}
    rows = {name: fits.fit(CONFIG, device=name, policies=["full"], **REQUEST) for name in ("t4", "l4")}
    said = {
        name: "--dtype float16 takes half" in fits.fit_report(found, name).markdown() for name, found in rows.items()
    }
    assert said == {"t4": True, "l4": False} and rows["t4"][0].weights == "float32"


@pytest.mark.parametrize("name", ["h9000", "", "t4\n", 5])
def test_unknown_devices(name):
    with pytest.raises(UsageError, match=r"No device is called .*; known are t4, l4, a100-40"):
        kvjax.plan(CONFIG, device=name, **REQUEST)


def test_a_device_and_a_limit():
    with pytest.raises(UsageError, match="give one of them"):
        kvjax.plan(CONFIG, device="t4", memory_limit=10**9, **REQUEST)


def small(monkeypatch, limit: int) -> None:
    """A TPU of so many bytes."""
    monkeypatch.setitem(CHIPS, "v5e", fits.chip("v5e").__class__("TPU v5e", limit))


def test_rows_fit_as_plans_do(monkeypatch):
    planned = {"dtype": "bfloat16", "device": "v5p"}
    plans = {policy: kvjax.plan(CONFIG, policy=policy, **planned, **REQUEST) for policy in fits.POLICIES}
    small(monkeypatch, plans["lagkv:ratio=0.25"].total_bytes)
    rows = fits.fit(CONFIG, device="v5e", **REQUEST)
    assert [(row.weights, row.policy) for row in rows] == [
        (w, p) for w in ("bfloat16", "int8", "int4", "fp8") for p in fits.POLICIES
    ]
    for row in rows[4:8]:
        made = kvjax.plan(CONFIG, policy=row.policy, weights="int8", **planned, **REQUEST)
        assert (row.plan.weights_bytes, row.plan.cache_bytes) == (made.weights_bytes, made.cache_bytes)
    rows = rows[:4]
    assert [row.fits for row in rows] == [False, False, True, True]
    for row in rows:
        try:
            made = kvjax.plan(CONFIG, device="v5e", dtype="bfloat16", policy=row.policy, **REQUEST)
        except DoesNotFit:
            assert not row.fits and row.spare_bytes < 0 and "refused" in row.verdict() and "too much" in row.verdict()
        else:
            assert row.fits and row.plan.total_bytes == made.total_bytes and "to spare" in row.verdict()
            assert row.spare_bytes == made.memory_limit - made.total_bytes


def test_what_fits_without_room_to_spare_for_later_turns_fits(monkeypatch):
    request = REQUEST | {"batch": 5}
    usual = kvjax.plan(CONFIG, dtype="bfloat16", device="v5p", **request)
    small(monkeypatch, usual.total_bytes - 1)
    tight = kvjax.plan(CONFIG, dtype="bfloat16", device="v5e", **request)
    small(monkeypatch, tight.total_bytes)
    row, *_ = fits.fit(CONFIG, device="v5e", policies=["full"], **request)
    assert row.fits and row.plan.total_bytes == tight.total_bytes < usual.total_bytes


def test_forms_of_weights_are_tried_in_order(monkeypatch):
    forms = {name: {"dtype": name} for name in ("float32", "bfloat16")}
    rows = fits.fit(CONFIG, device="v6e", policies=["full"], forms=forms, **REQUEST)
    assert [row.weights for row in rows] == list(forms)
    assert rows[0].plan.weights_bytes == 2 * rows[1].plan.weights_bytes


def test_a_policy_that_is_none_for_the_model_is_refused_in_its_row():
    rows = fits.fit(CONFIG, device="v5e", policies=["full", "razor:heads=99.0"], **REQUEST)[:2]
    assert rows[0].fits and not rows[1].fits and rows[1].plan is None and rows[1].verdict().endswith(".")
    with pytest.raises(UsageError, match="context is 8192"):
        fits.fit(CONFIG, device="v5e", prompt_tokens=9000)


def test_the_command(tmp_path, capsys):
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--prompt-tokens", "500", "--device", "l4", "--fit"]
    assert main([*words, "--policy", "streamingllm:window=64"]) == 0
    said = capsys.readouterr().out
    assert "streamingllm" in said and "lagkv:ratio=0.125" in said and "to spare" in said
    assert "NVIDIA L4, JAX reserves 75% of the GPU's 23.6 GB" in said and "MEM_FRACTION=0.95 before Python" in said
    assert main([*words, "--json", "--dtype", "float32"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["weights"], row["policy"]) for row in rows] == [
        (weights, policy) for weights in ("float32", "int8", "int4", "fp8") for policy in fits.POLICIES
    ]
    assert main([*words, "--json", "--weights", "int8"]) == 0
    assert {row["weights"] for row in json.loads(capsys.readouterr().out)} == {"int8"}
    assert all(row["fits"] and row["spare_bytes"] > 0 for row in rows)
    assert main([*words, "--memory-limit", "8GB"]) == 2 and main([*words[:-2], "h9"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_what_best_stands_for_is_named_and_the_verdict_comes_first():
    rows = fits.fit(CONFIG, device="v5e", policies=("full", "best:ratio=0.25"), **REQUEST)
    assert [row.policy for row in rows[:2]] == ["full", "adaptive:ratio=0.25,inner=kvzip"]
    columns = [column.name for column in fits.fit_report(rows, "v5e").parts[0].columns]
    assert columns == ["weights", "policy", "v5e", "total", "weights", "cache", "prefill peak"]
