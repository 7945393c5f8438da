"""The project's own promises: README, dependencies, imports, lint and types."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import toys

import kvjax

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_readme_python_runs(monkeypatch, capsys):
    lm = toys.tiny_model(max_position=8192)
    monkeypatch.setattr(kvjax, "load", lambda name: lm)
    (code,) = blocks("python")
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=4", code).replace("temperature=0.7", "max_new_tokens=4")
    exec(compile(code, "README.md", "exec"), {"novel": "She walked along the shore. " * 20})
    assert "weights" in capsys.readouterr().out


def test_readme_commands_use_flags_that_exist():
    """Every line of the command-line examples parses; --help after the flags keeps them from running."""
    lines = [line.split(" | ")[-1] for block in blocks("bash") for line in block.splitlines() if "kvjax " in line]
    names = "generate|chat|batch|plan|bench|policies|fetch|calibrate|compare|picture|tune"
    commands = [re.search(rf"kvjax ((?:{names})\b.*)", line) for line in lines]
    found = [match[1].split("&&")[0] for match in commands if match]
    assert len(found) >= 8
    for command in found:
        # The shell splits the words, as it would for a reader.
        done = subprocess.run(
            ["bash", "-c", f'"$0" -m kvjax {command} --help', sys.executable], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_ci_runs_the_readme_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (extract,) = re.findall(r"command=\$\((.*)\)\n", script)
    done = subprocess.run(["bash", "-c", extract], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() in README
    assert "pytest" in done.stdout and "venv" in done.stdout


def test_every_dependency_is_used_and_has_a_reason():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvjax").rglob("*.py"))
    for requirement in tomllib.loads(text)["project"]["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert re.search(rf"{re.escape(requirement)}\",\s*# \S+", text), f"{name} has no reason"
        module = {"pyyaml": "yaml", "orbax-checkpoint": "orbax"}.get(name, name)
        assert re.search(rf"(import|from) {module}\b", source), f"{name} is not imported"
        assert name != "torch"


def test_import_is_light():
    """No work at import: not even JAX is loaded before something is used."""
    script = "import sys, kvjax; sys.exit(str({'jax', 'numpy', 'transformers', 'rich', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


def test_public_names_exist_and_are_documented():
    for name in kvjax.__all__:
        assert getattr(kvjax, name).__doc__, name


@pytest.mark.parametrize(
    "command",
    [["ruff", "check"], ["ruff", "format", "--check"], ["pyright", "--pythonpath", sys.executable]],
    ids=" ".join,
)
def test_lint_and_types(command):
    tool = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip(f"{command[0]} is not installed; the extra dev has it")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_shapes_in_signatures_are_checked_here():
    import jax.numpy as jnp
    import jaxtyping

    from kvjax.cache import pool

    cache = pool.empty_layer(1, (1, 1), 8, jnp.float32)
    k, v = jnp.zeros((1, 2, 8)), jnp.zeros((1, 3, 8))
    with pytest.raises(jaxtyping.TypeCheckError):
        pool.append_token(cache, k, v, jnp.ones((1,), bool))
