"""What is compiled is kept for the next process, where the user has not said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax
jax.jit(lambda x: x * 5)(1.0)  # JAX has looked for a folder before kvjax is asked
{before}
from kvjax.compile_cache import keep_compiled_programs
keep_compiled_programs()
jax.jit(lambda x: x * 3 + 1)(2.0)
print(jax.config.jax_compilation_cache_dir)
"""


def folder_after(tmp_path: Path, before: str = "", **environment: str) -> tuple[str, list[Path]]:
    """The folder that JAX keeps programs in, and the programs in the default one."""
    own = {"KVJAX_CACHE": str(tmp_path / "kvjax"), "JAX_PLATFORMS": "cpu"} | environment
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "KVJAX_"))}
    script = [sys.executable, "-c", SCRIPT.format(before=before)]
    done = subprocess.run(script, env=clean | own, capture_output=True, text=True, check=True)
    return done.stdout.strip(), list((tmp_path / "kvjax" / "xla").glob("*"))


def test_programs_are_kept_in_the_users_cache(tmp_path):
    folder, kept = folder_after(tmp_path)
    assert folder == str(tmp_path / "kvjax" / "xla") and kept


@pytest.mark.parametrize("own", ["variable", "setting"])
def test_a_users_own_folder_stays(tmp_path, own):
    mine = str(tmp_path / "mine")
    if own == "variable":
        folder, kept = folder_after(tmp_path, JAX_COMPILATION_CACHE_DIR=mine)
        assert list(Path(mine).glob("*"))  # small programs too
    else:
        folder, kept = folder_after(tmp_path, f"jax.config.update('jax_compilation_cache_dir', {mine!r})")
    assert folder == mine and not kept


def test_one_variable_switches_it_off(tmp_path):
    assert folder_after(tmp_path, KVJAX_COMPILE_CACHE="0") == ("None", [])


def test_loading_keeps_programs_unless_told_not_to(tmp_path, monkeypatch):
    import kvjax

    asked: list[str] = []
    monkeypatch.setattr("kvjax.checkpoints.load.keep_compiled_programs", lambda: asked.append("kept"))
    for options in ({}, {"compile_cache": False}):
        with pytest.raises(kvjax.UsageError):
            kvjax.load(tmp_path / "nothing.gguf", **options)
    assert asked == ["kept"]
