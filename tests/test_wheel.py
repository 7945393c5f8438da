"""The wheel holds the packages that users import and nothing else."""

from __future__ import annotations

import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import kvjax

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"kvjax", "pallas_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel as pip builds it, without a network or another environment."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return zipfile.ZipFile(path)


def test_every_module_of_the_packages_is_there_and_no_other_file(wheel):
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(x.relative_to(ROOT)) for package in PACKAGES for x in (ROOT / package).rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == modules
    profiles = {f"kvjax/profiles/{x.name}" for x in (ROOT / "configs/profiles").iterdir() if x.is_file()}
    assert profiles and profiles <= held
    sources = {str(x.relative_to(ROOT)) for end in ("cc", "h") for x in (ROOT / "pallas_kernels/cpu").glob(f"*.{end}")}
    assert len(sources) == 14
    assert held - modules - profiles == {f"{package}/py.typed" for package in PACKAGES} | sources
    assert not [name for name in held if {"tests", "tools", "scripts", "aot"} & set(Path(name).parts)]


def test_the_metadata_is_complete(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == kvjax.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])} >= {"Homepage", "Changelog"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)
