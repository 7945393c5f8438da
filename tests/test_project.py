"""The project's own promises: README, the commands that pages show, dependencies, imports, lint and types."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import toys
from support import sampled
from support.howto import blocks

import kvjax
from kvjax.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
CPP = [str(path) for path in sorted((ROOT / "pallas_kernels/cpu").iterdir()) if path.suffix in (".cc", ".h")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages whose commands a reader may type.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = (
    "generate|chat|batch|plan|bench|policies|fetch|calibrate|compare|compare-rounds|eval|lm-eval|recommend|picture|tune|read|warm|"
    "models|convert"
)


def test_readme_is_one_page():
    assert len(README.splitlines()) <= 160


def test_readme_python_runs(monkeypatch, capsys, tmp_path):
    lm = toys.tiny_model(max_position=16384)
    monkeypatch.setattr(kvjax, "load", lambda name: lm)
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert len(block.body.splitlines()) <= 15
    code = block.body.replace("LagKV(", "LagKV(lag=32, ")
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text()[:1500])  # this model reads a byte a token
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec", dont_inherit=True), {})
    assert "weights" in capsys.readouterr().out


def typed(page: Path) -> list[str]:
    """The kvjax commands in a page's shell blocks, without ``kvjax``."""
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.body.splitlines()]
    parts = [part for line in lines for part in re.split(r" \| | && ", line)]
    found = [re.match(rf"(?:\S+=\S+ )*(?:\.venv/bin/)?kvjax ((?:{COMMANDS})\b.*)", part) for part in parts]
    assert len([part for part in parts if re.search(r"(^|/)kvjax ", part)]) == sum(map(bool, found)), page
    return [match[1] for match in found if match]


@pytest.mark.parametrize("page", [page for page in PAGES if typed(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_use_flags_that_exist(page, capsys):
    """Every command parses; --help after its flags keeps it from running. The shell splits it, as for a reader."""
    for command in typed(page):
        words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
        code = main([*words.stdout.split("\0")[:-1], "--help"])
        assert code == 0, f"{command}: {capsys.readouterr().err}"


def test_pages_show_every_command():
    shown = {command.split()[0] for page in PAGES for command in typed(page)}
    assert shown == set(COMMANDS.split("|"))


def test_configurations_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(r"configs/[\w./-]+\.yaml", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_programs_that_pages_run_exist():
    text = "".join(block.body for page in PAGES for block in blocks(page) if block.language == "bash")
    files = re.findall(r"\b(?:scripts|tools)/[\w/]+\.py", text)
    modules = re.findall(r"python -m ((?:tools|pallas_kernels|kvjax)[\w.]*)", text)
    assert files
    for name in [*files, *(f"{module.replace('.', '/')}.py" for module in modules)]:
        path = ROOT / name
        assert path.exists() or (path.with_suffix("") / "__main__.py").exists(), name


def test_modules_that_docstrings_name_exist():
    """A module that was renamed keeps no old name in the words of others: those of its room say its name alone."""
    for path in (path for room in ("kvjax", "pallas_kernels") for path in (ROOT / room).rglob("*.py")):
        for name in re.findall(r"``([\w/]+\.py)``", path.read_text(encoding="utf-8")):
            above = (ROOT, ROOT / "kvjax") if "/" in name else path.parents[:2]
            assert any((folder / name).exists() for folder in above), f"{path.relative_to(ROOT)}: {name}"


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
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["pyright", "--pythonpath", sys.executable],
        ["clang-format", "--dry-run", "--Werror", *CPP],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_lint_and_types(command):
    tool = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip(f"{command[0]} is not installed; the extra dev has it")
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_shapes_in_signatures_are_checked_here():
    import jax.numpy as jnp
    import jaxtyping

    from kvjax.cache import pool

    cache = pool.empty_layer(1, (1, 1), 8, jnp.float32)
    k, v = jnp.zeros((1, 2, 8)), jnp.zeros((1, 3, 8))
    with pytest.raises(jaxtyping.TypeCheckError):
        pool.append_token(cache, k, v, jnp.ones((1,), bool))


def test_what_is_sampled_is_there():
    """A name that nothing has would leave all cases of a long test in the default suite."""
    bases = "".join(path.read_text() for path in (ROOT / "tests" / "support").glob("*_base.py"))
    for name in sampled.SAMPLED:
        file, *classes, function = name.split("::")
        text = (ROOT / "tests" / file).read_text()
        assert all(f"class {name}(" in text for name in classes), name
        assert f"def {function}(" in (text + bases if classes else text), name
