"""The notebooks' first cell: the same in all, and right about what is there, what it installs and from where."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import notebooks

ROOT = Path(__file__).parents[2]
CELL = (ROOT / "colab" / "first_cell.py").read_text(encoding="utf-8")
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MISSING = type("PackageNotFoundError", (Exception,), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_begins_with_it(path):
    assert path.read_text(encoding="utf-8") == notebooks.written(path), "run `python -m tools.notebooks`"
    first = next(cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code")
    assert "".join(first["source"]) + "\n" == CELL


def functions(**changes) -> dict:
    """What the cell defines, without running it."""
    code, called, rest = CELL.rpartition("\nprepare()\n")
    assert called and not rest
    names: dict = {"__name__": "cell"}
    exec(compile(code, "first_cell.py", "exec"), names)
    names.update(changes)
    return names


class Machine:
    """Packages by version, and what they ask for; ``pip`` changes them as it would."""

    PackageNotFoundError = MISSING

    def __init__(self, **packages: str):
        self.packages = {name.replace("_", "-"): version for name, version in packages.items()}
        self.asked: list[tuple[str, ...]] = []
        self.gives: dict[str, str] = {}

    def requires(self, name: str) -> list[str]:
        self.version(name)
        extras = PROJECT["optional-dependencies"]
        wanted = [text for text in PROJECT["dependencies"] if text.startswith("jax>")]
        if name == "kvjax":
            return wanted + [
                f'{text}; extra == "{extra}"' for extra in ("cuda", "cuda13", "tpu") for text in extras[extra]
            ]
        version = self.packages["jax"]
        same = f"<={version},>={version}"
        plugins = {
            "cuda12": f"jax-cuda12-plugin{same}",
            "cuda13": f"jax-cuda13-plugin{same}",
            "tpu": "libtpu==0.0.42.*",
        }
        if name == "jax":
            return [f"jaxlib{same}", *(f'{text}; extra == "{extra}"' for extra, text in plugins.items())]
        return []

    def version(self, name: str) -> str:
        if name not in self.packages:
            raise MISSING(name)
        return self.packages[name]

    def distributions(self) -> list:
        return [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in self.packages.items()]

    def packages_distributions(self) -> dict[str, list[str]]:
        return {name.replace("-", "_"): [name] for name in self.packages}

    def pip(self, *arguments: str) -> None:
        self.asked.append(arguments)
        if arguments[0] == "uninstall":
            for name in arguments[3:]:
                del self.packages[name]
        else:
            self.packages.update(self.gives)


def on(machine: Machine, kind: str, **changes) -> dict:
    names = functions(metadata=machine, pip=machine.pip, accelerator=lambda: kind, **changes)
    names["importlib"] = SimpleNamespace(
        invalidate_caches=lambda: None,
        util=SimpleNamespace(find_spec=lambda name: SimpleNamespace(origin="x") if name in machine.packages else None),
    )
    names.setdefault("said", [])
    names["restart"] = lambda: names["said"].append("restart")
    names["check"] = lambda kind: names["said"].append(f"check {kind}")
    names["source"] = lambda: "git+https://example.org/kvjax"
    return names


COLAB = {"jax": "0.7.2", "jaxlib": "0.7.2"}
NEW = {"kvjax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}


@pytest.mark.parametrize("loaded", [True, False])
def test_a_colab_with_a_gpu(loaded):
    machine = Machine(**COLAB, jax_cuda12_plugin="0.7.2", jax_cuda12_pjrt="0.7.2")
    machine.gives = NEW | {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
    modules = {"jax.numpy": None, "jax": None} if loaded else {"os": None}
    names = on(machine, "gpu", sys=SimpleNamespace(modules=modules))
    names["prepare"]()
    assert machine.asked == [("install", "-q", "kvjax[cuda,eval,batch] @ git+https://example.org/kvjax")]
    assert names["said"] == (["restart"] if loaded else ["check gpu"])
    names["prepare"]()  # after the restart nothing is installed again
    assert len(machine.asked) == 1 and names["said"][-1] == "check gpu"


def test_a_colab_with_a_tpu():
    machine = Machine(**COLAB, libtpu="0.0.21.1")
    machine.gives = NEW | {"libtpu": "0.0.42.1"}
    names = on(machine, "tpu", sys=SimpleNamespace(modules={}))
    names["prepare"]()
    assert machine.asked == [("install", "-q", "kvjax[tpu,eval,batch] @ git+https://example.org/kvjax")]
    assert names["said"] == ["check tpu"]
    machine.packages["libtpu"] = "0.0.21.1"
    assert names["problems"]("tpu") == ["libtpu is 0.0.21.1, and jax needs ==0.0.42.*"]


def test_a_runtime_without_accelerator_loses_a_plugin_of_another_version():
    machine = Machine(**COLAB, jax_cuda12_plugin="0.7.2", jax_cuda12_pjrt="0.7.2")
    machine.gives = NEW
    names = on(machine, "cpu", sys=SimpleNamespace(modules={}))
    names["prepare"]()
    assert machine.asked == [
        ("install", "-q", "kvjax[eval,batch] @ git+https://example.org/kvjax"),
        ("uninstall", "-q", "-y", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    ]
    assert names["said"] == ["check cpu"] and machine.packages == NEW


def test_what_pip_leaves_wrong_is_said():
    machine = Machine(**COLAB)
    machine.gives = NEW | {"jaxlib": "0.10.1"}
    names = on(machine, "gpu", sys=SimpleNamespace(modules={}))
    with pytest.raises(RuntimeError, match=r"jaxlib is 0\.10\.1, and jax needs .*; jax-cuda12-plugin is missing\."):
        names["prepare"]()
    assert names["said"] == []


def test_nothing_is_installed_where_kvjax_is_ready():
    machine = Machine(**NEW)
    names = on(machine, "cpu")
    names["prepare"]()
    assert machine.asked == [] and names["said"] == ["check cpu"]
    assert names["problems"]("gpu") == ["jax-cuda12-plugin is missing"]


@pytest.mark.parametrize(
    ("environment", "smi", "kind"),
    [
        ({}, None, "cpu"), ({}, 0, "gpu"), ({}, 9, "cpu"), ({"JAX_PLATFORMS": "cpu"}, 0, "cpu"),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, None, "tpu"), ({"COLAB_TPU_ADDR": "10.0.0.2"}, None, "tpu"),
        ({"PJRT_DEVICE": "TPU"}, None, "tpu"),
    ],
)  # fmt: skip
def test_the_accelerator_is_found_without_jax(environment, smi, kind):
    names = functions(
        os=SimpleNamespace(environ=environment),
        shutil=SimpleNamespace(which=lambda name: None if smi is None else f"/usr/bin/{name}"),
        subprocess=SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=smi)),
    )
    names["Path"] = lambda path: SimpleNamespace(exists=lambda: False)
    assert names["accelerator"]() == kind
    assert "import jax" not in CELL.partition("def check")[0]


@pytest.mark.parametrize("given", ["wheel", "zip", "folder", "clone", "path", "git", "nothing", "a wrong path"])
def test_kvjax_comes_from_one_stated_source(given, tmp_path, monkeypatch):
    here = tmp_path / "clone" / "colab"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    places = {
        "wheel": here / "kvjax-0.2-py3-none-any.whl",
        "zip": here / "kvjax.zip",
        "folder": here / "kvjax" / "pyproject.toml",
        "clone": here.parent / "pyproject.toml",
        "path": tmp_path / "elsewhere.whl",
    }
    if given in places:
        places[given].parent.mkdir(exist_ok=True)
        places[given].write_text("")
    if given == "wheel":
        older = here / "kvjax-0.1-py3-none-any.whl"
        older.write_text("")
        os.utime(older, (1, 1))
    constant = {"git": "git+https://example.org/kvjax", "path": str(places["path"]), "a wrong path": "nowhere.whl"}
    names = functions(SOURCE=constant.get(given, ""))
    if given in ("nothing", "a wrong path"):
        with pytest.raises(FileNotFoundError, match=r"kvjax is not .*: upload its wheel or kvjax\.zip, or set SOURCE"):
            names["source"]()
        return
    file = places.get(given)
    wanted = constant["git"] if file is None else (file.parent if file.name == "pyproject.toml" else file).as_uri()
    assert names["source"]() == wanted


def test_the_text_above_it_says_where_kvjax_comes_from():
    for word in ("wheel", "kvjax.zip", "SOURCE", "git", "restarts"):
        assert word in notebooks.BEFORE


def test_devices_are_checked_in_a_sentence(monkeypatch, capsys):
    import jax

    check = functions()["check"]
    check("cpu")
    assert re.fullmatch(r"kvjax [\d.]+, JAX [\d.]+, on \d+ x cpu\n", capsys.readouterr().out)
    with pytest.raises(RuntimeError, match=r"has an NVIDIA GPU, and JAX [\d.]+ computes on cpu: restart the runtime"):
        check("gpu")

    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda': no device\nmore")

    monkeypatch.setattr(jax, "devices", fails)
    with pytest.raises(RuntimeError, match=r"JAX [\d.]+ cannot start its devices: Unable to initialize .* no device$"):
        check("gpu")


def _python() -> str:
    """The Python of a Colab, or the one there is."""
    found = next(Path.home().glob(".pyenv/versions/3.13.*/bin/python"), None) or shutil.which("python3.13")
    return str(found or sys.executable)


@pytest.mark.slow
def test_in_an_environment_like_a_fresh_colab(tmp_path):
    """JAX 0.7.2 and its CUDA plugin are there; what pip then does, on this machine without an accelerator, is real.

    For a GPU and a TPU pip says what it would install: the libraries themselves are gigabytes.
    """
    subprocess.run([_python(), "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True)

    colab = pip("install", "-q", *(f"{name}==0.7.2" for name in ("jax", "jaxlib")))
    plugin = pip("install", "-q", "--no-deps", *(f"jax-cuda12-{part}==0.7.2" for part in ("plugin", "pjrt")))
    if colab.returncode or plugin.returncode:
        pytest.skip("no registry with Colab's packages can be reached")
    content = tmp_path / "content"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", content, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = content.glob("kvjax-*.whl")
    assert "kvjax/__init__.py" in zipfile.ZipFile(wheel).namelist()
    for extra, plugins in {"cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt"), "tpu": ()}.items():
        report = tmp_path / f"{extra}.json"
        asked = f"kvjax[{extra},eval,batch] @ {wheel.as_uri()}"
        ran = pip("install", "-q", "--dry-run", "--report", str(report), asked)
        assert ran.returncode == 0, ran.stderr
        made = {
            item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]
        }
        assert len({made[name] for name in ("jax", "jaxlib", *plugins)}) == 1, made
        assert extra != "tpu" or "libtpu" in made
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= {"JAX_PLATFORMS": "cpu"}
    for said in ("Installing kvjax and what it needs; this may take some minutes.\n", ""):  # then nothing is to do
        ran = subprocess.run(
            [python, ROOT / "colab" / "first_cell.py"], cwd=content, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert re.fullmatch(said + r"kvjax [\d.]+, JAX [\d.]+, on 1 x cpu\n", ran.stdout), ran.stdout
    assert "plugin" not in pip("list").stdout
