"""``kvjax compare``: what it prints and saves, and how it goes on; the measuring itself is tested elsewhere."""

from __future__ import annotations

import json

import pytest

from kvjax.eval.compare import Comparison
from kvjax.eval.results import AFTER, IN_VIEW, Row, Scored


@pytest.fixture
def measured(monkeypatch):
    """Rows appear without a model being asked; Ctrl-C comes before the share 0.125."""

    def run(self, entries, lengths):
        for length in lengths:
            for entry in entries:
                row = Row(length, entry.name, entry.retained, full_bytes=100.0, live_bytes=50.0)
                if row.key in {done.key for done in self.rows}:
                    continue
                if entry.retained == 0.125:
                    raise KeyboardInterrupt
                groups = tuple(Scored(mode, "niah_single_1", (0.0, 1.0), (1, 2)) for mode in (AFTER, IN_VIEW))
                self.rows.append(Row(**{**vars(row), "answers": groups}))
                self._save(self.rows)

    monkeypatch.setattr(Comparison, "run", run)


def test_prints_and_saves_the_same_table(cli, measured, tmp_path):
    out = tmp_path / "new" / "folder"
    asked = ["compare", "--out", str(out), "--policies", "lagkv,streamingllm:sink=2", "--retained", "0.5,0.25"]
    ran = cli(*asked, "--tasks", "niah_single_1", "--lengths", "300", "--samples", "2", "--markdown")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in out.iterdir()) == ["accuracy.png", "results.json", "results.md"]
    assert (out / "results.md").read_text() == ran.out
    held = json.loads((out / "results.json").read_text())
    assert held["settings"]["tasks"] == ["niah_single_1"] and held["settings"]["model"] == "tiny"
    assert len(held["settings"]["parameters"]) == 32, "other weights of the same name are another model"
    assert [(row["policy"], row["retained"]) for row in held["rows"]] == [
        ("full", None),
        ("lagkv", 0.5),
        ("lagkv", 0.25),
        ("streamingllm:sink=2", 0.5),
        ("streamingllm:sink=2", 0.25),
    ]
    assert ran.out.count("0.50 ± 0.50") == 5 * 4
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    more = cli(
        *asked[:3], "--policies", "streamingllm", "--tasks", "niah_single_1", "--lengths", "300", "--samples", "2"
    )
    assert "rows kept of an earlier run: 5" in more.err
    assert len(json.loads((out / "results.json").read_text())["rows"]) == 8
    assert more.code == 130, "the default shares end with 0.125"
    assert "results.md" in more.out and "streamingllm:sink=2" in more.out and "0.50 ± 0.50" in more.out


def test_ctrl_c_shows_what_there_is(cli, measured, tmp_path):
    ran = cli(
        "compare", "--out", str(tmp_path), "--policies", "lagkv", "--lengths", "300", "--samples", "2", "--markdown"
    )
    assert ran.code == 130
    assert "goes on from there" in ran.err and ran.err.splitlines()[-1] == "kvjax: Interrupted."
    assert ran.out.count("| 300 | lagkv |") == 2 * 3  # the shares above 0.125, in both tables
    assert (tmp_path / "accuracy.png").exists()


def test_ctrl_c_before_the_first_row_names_no_folder(cli, monkeypatch, tmp_path):
    def interrupted(self, entries, lengths):
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "run", interrupted)
    ran = cli("compare", "--out", str(tmp_path / "out"), "--policies", "lagkv", "--lengths", "300", "--samples", "2")
    assert ran.code == 130 and not ran.out and not (tmp_path / "out").exists()
    assert "nothing was measured yet; the same command goes on from there" in ran.err


def test_results_of_other_settings_are_not_mixed(cli, measured, tmp_path):
    asked = ["compare", "--out", str(tmp_path), "--policies", "lagkv", "--retained", "0.5", "--lengths", "300"]
    assert cli(*asked, "--samples", "2").code == 0
    ran = cli(*asked, "--samples", "3")
    assert ran.code == 2 and "samples" in ran.sentence and "another folder" in ran.sentence
