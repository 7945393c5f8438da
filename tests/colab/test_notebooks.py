"""The notebooks run from top to bottom on the default model, and are committed without what they print."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support import gguf_files

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
kvjax.load = lambda *_, **__: toys.needle_model(max_position=8192)
kvjax.RoundAttention = functools.partial(kvjax.RoundAttention, watershed=1)
"""
#: The other calls the command line, which loads the default model.
WITH_TOY = {"quickstart", "long_chat"}
#: Those that name a model of billions of parameters and a context; a tiny one of its family is written instead.
LARGE = {"llama_on_one_chip"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in LARGE], ids=lambda path: path.stem)
def test_runs(path, default_model, tmp_path, monkeypatch):
    run(path, tmp_path, monkeypatch, toy=path.stem in WITH_TOY)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client", "ignore::DeprecationWarning:zmq")
@pytest.mark.parametrize("name", sorted(LARGE))
def test_runs_on_a_tiny_model_of_the_family(name, tmp_path, monkeypatch):
    """Planned, read from safetensors as int8, and asked: by everything that the notebook calls."""
    case = gguf_files.case("llama_gqa", max_position_embeddings=4096)
    folder = gguf_files.write_folder(case, tmp_path / "model", template=True)
    given = {"MODEL": repr(str(folder)), "CONTEXT": "1_500"}
    said = run(ROOT / "colab" / f"{name}.ipynb", tmp_path, monkeypatch, toy=False, given=given)
    assert "int8" in said and "lagkv:ratio=0.25" in said and "fits" in said, said
    assert "float32, int8 weights" in said and said.count("tokens read") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WITH_TOY))
def test_runs_on_the_default_model(name, default_model, tmp_path, monkeypatch):
    run(ROOT / "colab" / f"{name}.ipynb", tmp_path, monkeypatch, toy=False)


def run(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, toy: bool, given: Mapping[str, str] | None = None
) -> str:
    """Within five minutes on two busy cores, and without asking for anything to be installed: kvjax is.

    ``given`` are other values of the notebook's constants. Returns what it printed.
    """
    places = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    notebook = nbformat.read(path, as_version=4)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if toy:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(TOY))
    for constant, value in (given or {}).items():
        cell = next(cell for cell in notebook.cells if f"\n{constant} = " in cell.source)
        cell.source = re.sub(rf"(?m)^{constant} = .*$", f"{constant} = {value}", cell.source)
    began = time.perf_counter()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    assert time.perf_counter() - began < 300
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs
    # Tables are shown and not printed.
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
