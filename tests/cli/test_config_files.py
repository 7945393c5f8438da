"""``--config``: every committed file is read by the commands it is for, and what makes no sense is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.cli import config_files
from kvjax.cli.main import root_command
from kvjax.policies import format_policy, parse
from kvjax.sharding.mesh import parse_mesh

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path for folder in ("models", "meshes", "policies") for path in (CONFIGS / folder).iterdir())
ROOT = root_command()


def parsed(command: str, *arguments: str) -> dict:
    """What a command line means to a command, without running it."""
    found = ROOT.commands[command]
    return found.make_context(command, list(arguments)).params


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_committed_file_is_read(path):
    values = parsed("batch", "--input", "in.jsonl", "--output", "out", "--config", str(path))
    changed = {name: values[name] for name in config_files.read(path)}
    assert changed and all(changed.values())
    if "policy" in changed:
        assert parse(format_policy(parse(changed["policy"]))) == parse(changed["policy"])
    if "mesh" in changed:
        assert str(parse_mesh(changed["mesh"])) == changed["mesh"]
    assert path.parent.name != "models" or values["model"].lower().endswith(path.stem)


def test_there_is_a_file_of_each_kind():
    assert {path.parent.name for path in FILES} == {"models", "meshes", "policies"}
    assert {path.suffix for path in FILES} == {".yaml"}


def test_every_command_that_runs_a_model_takes_files():
    commands = {**ROOT.commands, **ROOT.commands["calibrate"].commands}
    names = {name: {parameter.name for parameter in command.params} for name, command in commands.items()}
    assert {name for name, flags in names.items() if "config" in flags} == {
        name for name, flags in names.items() if "model" in flags and name not in ("fetch", "convert")
    }


def test_what_is_typed_wins_then_the_later_file(file):
    first = file("policy: h2o\nmax-new-tokens: 7\ntemperature: 1\nstop: [a, b]\nchat: false\n", "first.yaml")
    second = file("policy: {razor: {ratio: 0.4, inner: {slimkv: {budget: 512, value_only: null}}}}\n", "second.yaml")
    values = parsed("generate", "hello", "--config", first, "--config", second, "--max-new-tokens", "9")
    assert values["policy"] == "razor:ratio=0.4,inner=slimkv(budget=512,value_only=none)"
    assert (values["max_new_tokens"], values["temperature"], values["stop"]) == (9, 1.0, ["a", "b"])
    assert values["chat"] is False and values["min_p"] == 0.0 and values["prompt"] == ["hello"]
    assert parsed("generate", "hello", "--config", first)["policy"] == "h2o"
    assert parsed("generate", "hello", "--config", first, "--chat", "--stop", "c")["stop"] == ["c"]
    assert parsed("generate", "hello")["policy"] is None, "a file's defaults end with its command line"


def test_lists_and_mappings_are_written_as_they_are_typed(file):
    path = file("policies: [snapkv, {lagkv: {lag: 64}}]\nlengths: [700, 1500]\nout: results\nturns: false\n")
    values = parsed("compare", "--config", path)
    assert values["policies"] == "snapkv,lagkv:lag=64" and values["lengths"] == "700,1500"
    assert values["out"] == Path("results") and values["turns"] is False, "a needed flag may come from a file"
    assert parsed("bench", "--config", file("policy: [full, {tova: null}]\n"))["policy"] == ["full", "tova"]


BAD = {
    "unknown": ("polcy: lagkv", "sets 'polcy', which `kvjax plan` does not take; did you mean 'policy'?"),
    "another command's": ("temperature: 1", "sets 'temperature', which `kvjax plan` does not take"),
    "config in config": ("config: b.yaml", "sets 'config'"),
    "empty": ("", "holds no settings"),
    "a list": ("- policy", "holds no settings"),
    "not yaml": ("policy: [", "is not YAML (line"),
    "not text": (b"\xff", "is not UTF-8 text"),
    "code": ("policy: !!python/object:os.system x", "is not YAML"),
    "twice": ("max_new_tokens: 1\nmax-new-tokens: 2", "twice"),
    "a mapping": ("model: {name: x}", "sets model to {'name': 'x'}; write text or a number."),
    "two policies": ("policy: {lagkv: {}, h2o: {}}", "write one name with its options below it"),
    "options that are none": ("policy: {lagkv: 0.25}", "gives the policy lagkv 0.25"),
    "a word for a number": ("batch: many", "--batch is 'many'; give a whole number"),
    "a fraction": ("batch: 1.5", "--batch is '1.5'; give a whole number"),
    "a switch": ("batch: true", "sets batch to True; write text or a number."),
    "no switch": ("json: 1", "sets json to 1; write true or false."),
}


@pytest.mark.parametrize("case", BAD)
def test_what_makes_no_sense_is_one_sentence(cli, file, case):
    text, sentence = BAD[case]
    ran = cli("plan", "--prompt-tokens", "10", "--config", file(text))
    assert ran.code == 2 and sentence in ran.sentence


def test_a_file_that_is_not_there(cli, tmp_path):
    ran = cli("plan", "--prompt-tokens", "10", "--config", str(tmp_path / "no.yaml"))
    assert ran.code == 2 and "--config names a file that cannot be read" in ran.sentence


def test_a_policy_from_a_file_is_checked_like_a_typed_one(cli, file):
    ran = cli("plan", "--prompt-tokens", "10", "--config", file("policy: {lagkv: {ration: 0.5}}"))
    assert ran.code == 2 and "LagKV has no option 'ration'; did you mean 'ratio'?" in ran.sentence
    ran = cli("plan", "--prompt-tokens", "100", "--config", str(CONFIGS / "policies" / "lagkv-quarter.yaml"))
    assert ran.code == 0 and "lagkv:ratio=0.25" in ran.out


def test_a_file_without_an_end_is_not_read_to_it(cli, tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"#" * 1_000_001)
    for path in ("/dev/zero", str(tmp_path / "a.yaml")):
        found = cli("generate", "hi", "--config", path)
        assert found.code == 2 and found.sentence == f"{path} has more than 1 MB; give a smaller file."
