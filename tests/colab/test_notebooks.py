"""The notebooks run from top to bottom on the default model, and are committed without what they print."""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
import time
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)


#: Put before a notebook's first cell: a toy answers for the default model, in seconds.
TOY = """
import functools, kvjax, toys
kvjax.load = lambda *_, **__: toys.tiny_model(max_position=8192)
kvjax.RoundAttention = functools.partial(kvjax.RoundAttention, watershed=1)
"""
#: The other calls the command line, which loads the default model.
WITH_TOY = {"quickstart", "long_chat"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, default_model, tmp_path, monkeypatch):
    run(path, tmp_path, monkeypatch, toy=path.stem in WITH_TOY)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WITH_TOY))
def test_runs_on_the_default_model(name, default_model, tmp_path, monkeypatch):
    run(ROOT / "colab" / f"{name}.ipynb", tmp_path, monkeypatch, toy=False)


def run(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, toy: bool) -> None:
    """Within five minutes on two busy cores, and without asking for anything to be installed: kvjax is."""
    places = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    notebook = nbformat.read(path, as_version=4)
    if toy:
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        notebook.cells.insert(0, nbformat.v4.new_code_cell(TOY))
    began = time.perf_counter()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    assert time.perf_counter() - began < 300
    assert any(cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("source", ["zip", "folder", "clone", "git", "nothing"])
def test_installs_from_what_the_first_cell_says(path, source, tmp_path, monkeypatch):
    """In a runtime without kvjax: an uploaded zip or folder, the clone that holds the notebook, a git address."""
    here = tmp_path / "clone" / "colab"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here)])  # as in a notebook, without what is installed
    monkeypatch.delitem(sys.modules, "kvjax", raising=False)
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    places = {
        "zip": here / "kvjax.zip",
        "folder": here / "kvjax" / "pyproject.toml",
        "clone": here.parent / "pyproject.toml",
    }
    if source in places:
        places[source].parent.mkdir(exist_ok=True)
        places[source].write_text("")
    expected = {
        "zip": (here / "kvjax.zip").as_uri(),
        "folder": (here / "kvjax").as_uri(),
        "clone": here.parent.as_uri(),
        "git": "git+https://example.org/kvjax",
    }
    explanation, cell = nbformat.read(path, as_version=4).cells[:2]
    assert "kvjax.zip" in explanation.source and "SOURCE" in explanation.source and "git" in explanation.source
    code = re.sub(r'%pip install -q (".*")', r"asked.append(f\1)", cell.source)
    assert code != cell.source
    if source == "git":
        code = code.replace('SOURCE = ""', f'SOURCE = "{expected["git"]}"')
    asked: list[str] = []
    if source == "nothing":
        with pytest.raises(FileNotFoundError, match=r"upload kvjax\.zip"):
            exec(code, {"asked": asked})
    else:
        exec(code, {"asked": asked})
        (requirement,) = asked
        extra, _, address = requirement.partition(" @ ")
        assert address == expected[source]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        assert re.fullmatch(r"kvjax\[(\w+)\]", extra)[1] in extras
