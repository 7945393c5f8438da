"""Conversations, a profile and a config that version 0.1 wrote still load, and go on with the tokens that followed."""

from __future__ import annotations

import json
import pathlib
import tarfile

import pytest
from support import saved_talks as saved

import kvjax
from kvjax.cli.main import main

FOLDER = pathlib.Path(__file__).parent / "golden" / "saved-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return saved.model(tmp_path_factory.mktemp("saved") / "model")


def test_everything_that_was_written_is_read_here():
    assert {path.name for path in FOLDER.glob("*.tar.xz")} == {f"{name}.tar.xz" for name in EXPECTED["talks"]}
    assert EXPECTED["version"] == "0.1.0" and set(EXPECTED["talks"]) == set(saved.TALKS)


@pytest.mark.parametrize("name", saved.TALKS)
def test_a_conversation_goes_on(lm, name, tmp_path):
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    cache = kvjax.load_cache(tmp_path / name, lm)
    wanted, rows = EXPECTED["talks"][name], saved.TALKS[name][2]
    assert cache.seen.tolist() == wanted["seen"]
    assert saved.follow(lm, cache, saved.turns(name, rows)[-1]) == wanted["tokens"]
    # The names on the disk, and all that is said of the rows, are still those of 0.1.
    kvjax.save_cache(tmp_path / "again", cache, lm)
    then, now = (
        json.loads(next((tmp_path / folder).glob("*/_CHECKPOINT_METADATA")).read_text())["custom_metadata"]
        for folder in (name, "again")
    )
    assert now["policy"].keys() - then["policy"].keys() <= {"keep_turn"}, "what came since is beside them"
    assert len(now["checksum"].pop("description")) == 32, "as is the description's own digest"
    here = {"policy": now["policy"], "model": then["model"] | {"name": lm.name}, "kvjax": kvjax.__version__}
    assert now == then | here


def test_a_profile_and_a_config_are_read(lm, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(kvjax, "load", lambda name, **_: lm, raising=False)
    assert main(["generate", saved.prompt(), "--config", "config.yaml", "--json", "--no-compile-cache"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert output["tokens"] == EXPECTED["config"]
