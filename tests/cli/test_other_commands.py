"""``kvjax chat | plan | policies`` and what the command costs to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import toys

import kvjax


def test_chat_answers_each_piped_line_on_one_cache(cli):
    ran = cli("chat", "--max-new-tokens", "4", "--json", stdin=b"hello\n\nand then?\n")
    first, second = (json.loads(line) for line in ran.out.splitlines())
    assert ran.code == 0
    assert second["stats"]["seen"] > first["stats"]["seen"]


def test_chat_commands(cli):
    ran = cli("chat", "--max-new-tokens", "4", stdin=b"/stats\nhello\n/stats\n/reset\n/exit\nnever\n")
    assert ran.code == 0
    assert "Nothing was generated yet" in ran.err
    assert "cache allocated" in ran.err
    assert "A new conversation" in ran.err


def test_chat_says_which_line_is_not_utf8(cli):
    ran = cli("chat", stdin=b"\xff\n")
    assert ran.code == 2
    assert "Line 1 of standard input" in ran.sentence


def test_plan_prints_a_table_and_json(cli, tiny_model):
    arguments = ("plan", "--prompt-tokens", "64", "--batch", "2", "--policy", "lagkv:ratio=0.5")
    table = cli(*arguments)
    assert table.code == 0 and "weights" in table.out.lower()
    said = json.loads(cli(*arguments, "--json").out)
    direct = kvjax.plan(tiny_model, prompt_tokens=64, batch=2, policy="lagkv:ratio=0.5")
    assert said["cache_bytes"] == direct.cache_bytes
    assert said["total_bytes"] == direct.total_bytes


def test_models_lists_what_can_be_loaded_and_what_is_refused(cli):
    from kvjax.checkpoints.families import FAMILIES, gguf_name
    from kvjax.checkpoints.families.refused import REFUSED
    from kvjax.checkpoints.hub import KNOWN

    ran, said = cli("models"), json.loads(cli("models", "--json").out)
    assert [model["name"] for model in said["built_in"]] == list(KNOWN)
    assert {found["architecture"]: found["gguf"] for found in said["architectures"]} == {
        name: gguf_name(name) for name in FAMILIES
    }
    assert sorted(name for found in said["refused"] for name in found["architectures"]) == sorted(REFUSED)
    for name in (*KNOWN, *FAMILIES, *REFUSED):
        assert name in ran.out, name
    assert (gguf_name("mistral"), gguf_name("phi"), gguf_name("glm")) == ("llama", "phi2", "chatglm")


def test_policies_lists_every_policy_with_its_defaults(cli):
    ran = cli("policies")
    said = json.loads(cli("policies", "--json").out)
    assert set(said) == set(kvjax.policies.registry()) | {"best"}
    assert "sink=16" in ran.out
    (sink,) = (field for field in said["lagkv"]["fields"] if field["name"] == "sink")
    assert sink["default"] == 16
    assert all(policy["summary"] for policy in said.values())


def test_closed_standard_streams_are_like_dev_null():
    close = "import os, sys; os.close(0); os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for arguments, code in ((["policies"], 0), (["generate", "-", "--model", "no/such/model"], 2)):
        command = [sys.executable, "-c", close, "-m", "kvjax", *arguments]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        assert ran.returncode == code and "Unexpected" not in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_PLATFORMS", "banana"), ("JAX_PLATFORMS", "cuda"), ("JAX_COMPILATION_CACHE_MAX_SIZE", "abc")],
)
def test_a_setting_that_jax_refuses_is_named(name, value):
    asks = """
from kvjax.cli.main import explain
try:
    import jax
    jax.devices()
except Exception as error:
    print(*explain(error))
"""
    ran = subprocess.run(
        [sys.executable, "-c", asks], env=os.environ | {name: value}, stdout=subprocess.PIPE, text=True
    )
    assert ran.stdout.startswith(f"2 JAX cannot use {name}='{value}' of the environment ("), ran.stdout


@pytest.mark.slow
def test_bench_prints_and_saves(cli, tmp_path, monkeypatch):
    from kvjax.bench import machine

    monkeypatch.setattr(machine.BandwidthMeter.__init__, "__defaults__", (1 << 20,))
    sizes = "bench --batch 1,2 --context 64 --prefill 64 --rounds 2 --steps 4 --long-steps 120".split()
    chosen = "--policy full --policy streamingllm:budget=32".split()
    ran = cli(*sizes, *chosen, "--markdown", "--json", str(tmp_path / "result.json"))
    assert ran.code == 0, ran.err
    saved = json.loads((tmp_path / "result.json").read_text())
    assert [(row["batch"], row["candidate"]) for row in saved["decode"]] == [
        (1, "full"),
        (1, "streamingllm:budget=32"),
        (2, "full"),
        (2, "streamingllm:budget=32"),
    ]
    assert len(saved["prefill"]) == 2 and len(saved["long"]) == 1
    assert ran.out.count("| full |") == 3
    assert "its cache grows" in ran.err


@pytest.mark.slow
def test_an_interrupted_bench_reports_the_cases_that_are_done(cli, tmp_path, monkeypatch):
    from kvjax.bench import machine, measurements

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(machine.BandwidthMeter.__init__, "__defaults__", (1 << 20,))
    monkeypatch.setattr(measurements.Bench, "prefill", stopped)
    sizes = "bench --batch 1 --context 64 --prefill 64 --rounds 1 --steps 2".split()
    ran = cli(*sizes, "--policy", "full", "--markdown", "--json", str(tmp_path / "result.json"))
    assert ran.code == 130 and ran.out.count("| full |") == 1
    assert len(json.loads((tmp_path / "result.json").read_text())["decode"]) == 1


def test_bench_of_a_shape_needs_no_weights(cli, tmp_path):
    chosen = "--policy full --policy h2o:ratio=0.125 --rounds 1 --markdown".split()
    saved = tmp_path / "decode.json"
    ran = cli(
        *"bench decode --shape tiny --dtype float32 --batch 2 --context 128".split(), *chosen, "--json", str(saved)
    )
    assert ran.code == 0, ran.err
    rows = json.loads(saved.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", "h2o:ratio=0.125"]
    assert all(row["tokens_per_second"] > 0 for row in rows) and rows[1]["cache_bytes"] < rows[0]["cache_bytes"]
    assert ran.out.count("| 2 | 128 |") == 2 and "shape tiny" in ran.out


def test_a_shape_without_room_says_so(monkeypatch):
    from kvjax.bench import shapes

    monkeypatch.setattr(shapes, "_memory", lambda: 10**5)
    (row,) = shapes.measure("tiny", [1], [64], ["full"], dtype="float32", rounds=1)
    assert "the device has" in row.note and not row.tokens_per_second
    assert "the device has" in shapes.report([row], {}).markdown()


@pytest.mark.slow
def test_bench_of_kernels(cli, tmp_path):
    saved = tmp_path / "kernels.json"
    ran = cli(*"bench kernels --mean 64 --batch 1 --heads 2 --head-dim 64 --rounds 1 --json".split(), str(saved))
    assert ran.code == 0, ran.err
    assert len(json.loads(saved.read_text())) == 1 and "GB/s" in ran.out


def test_a_cpu_has_nothing_to_tune(cli, tmp_path):
    ran = cli("tune", str(tmp_path / "sizes.json"))
    assert ran.code == 1 and "nothing to tune" in ran.err and not (tmp_path / "sizes.json").exists()


def test_help_imports_nothing_heavy():
    """Half a second is promised for --help; what would break it is an import, which is what is checked."""
    script = (
        "import sys; from kvjax.cli.main import main; code = main(['generate', '--help']);"
        "heavy = {'jax', 'flax', 'numpy', 'transformers', 'gguf', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout


def test_version(cli):
    ran = cli("--version")
    assert ran.code == 0 and ran.out.startswith("kvjax ")


def test_a_plan_refuses_other_weights_than_a_folder_was_converted_to(cli, monkeypatch):
    monkeypatch.setattr(kvjax, "load_config", lambda model: toys.tiny_config().stored_as("int8"))
    asked = ("plan", "--model", "converted", "--prompt-tokens", "9")
    assert cli(*asked).code == cli(*asked, "--weights", "int8").code == 0
    for more in ((), ("--fit", "--device", "t4")):
        ran = cli(*asked, "--weights", "int4", *more)
        assert ran.code == 2 and "The model's weights are int8; leave --weights out" in ran.err


def test_a_context_is_read_from_standard_input(cli):
    asked = ("generate", "What?", "--max-new-tokens", "1", "--json", "--context")
    piped = cli(*asked, "-", stdin=b"A context of some words.\n")
    told = cli(*asked, "A context of some words.")
    assert piped.code == told.code == 0
    numbers = [json.loads(ran.out)["outputs"][0]["stats"]["prompt_tokens"] for ran in (piped, told)]
    assert numbers[0] == numbers[1] > len("A context".split())
