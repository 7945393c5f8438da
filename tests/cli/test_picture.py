"""``kvjax picture``: a PNG, the numbers beside it, and refusals."""

from __future__ import annotations

import json

from kvjax.eval.compare import Comparison
from kvjax.eval.results import AFTER, IN_VIEW, Row, Scored


def test_positions_of_a_text(cli, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    ran = cli(
        *("picture", "retained-positions", "--out", str(tmp_path / "kept.png"), "--ratio", "0.6"),
        *("--text", f"@{tmp_path / 'text.txt'}", "--length", "150"),
    )
    assert ran.code == 0, ran.err
    assert (
        "ahakv:recent=32,ratio=0.6 reads 150 tokens" in ran.err
        and "h2o:recent=32,ratio=0.6 reads" in ran.err
        and "Saved" in ran.out
    )
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_goes_on_where_it_was_left(cli, tmp_path, monkeypatch):
    asked = []

    def run(self, candidates, lengths):
        held = {row.key for row in self.rows}
        for candidate in candidates:
            if (lengths[0], candidate.name, candidate.retained) in held:
                continue
            asked.append(candidate)
            if len(asked) == 5:
                raise KeyboardInterrupt
            groups = tuple(Scored(mode, "t", (1.0,), (1,)) for mode in (AFTER, IN_VIEW))
            self.rows.append(Row(lengths[0], candidate.name, candidate.retained, answers=groups))
            self._save(self.rows)

    monkeypatch.setattr(Comparison, "run", run)
    command = ("picture", "slimkv-scores", "--out", str(tmp_path / "scores.png"), "--length", "300")
    ran = cli(*command)
    assert ran.code == 130 and "goes on from there" in ran.err
    assert len(json.loads((tmp_path / "scores.json").read_text())["rows"]) == 4
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert cli(*command).code == 0
    assert len(json.loads((tmp_path / "scores.json").read_text())["rows"]) == 13
    assert len(asked) == 5 + 9, "the four that were there are not asked again"


def test_questions_and_answers_of_dialogues(cli, tmp_path):
    told = tmp_path / "told.jsonl"
    messages = [{"role": role, "content": f"{role} {i}."} for i in range(4) for role in ("user", "assistant")]
    told.write_text(json.dumps({"messages": [*messages, {"role": "user", "content": "Well?"}]}) + "\n")
    command = ("picture", "question-answer", "--out", str(tmp_path / "alike.png"))
    ran = cli(*command, "--dialogues", str(told), "--least-rounds", "4")
    assert ran.code == 0, ran.err
    assert "Dialogues: 1. Question and answer correlate" in ran.out and "dialogue 1 of 1" in ran.err
    assert (tmp_path / "alike.png").read_bytes().startswith(b"\x89PNG")
    for options, says in (
        ((), "--dialogues"),
        (("--dialogues", str(told), "--least-rounds", "5"), "5 rounds"),
        (("--dialogues", str(told), "--least-rounds", "2"), "least-rounds is 2"),
        (("--dialogues", str(told), "--most", "0"), "most is 0"),
    ):
        refused = cli(*command, *options)
        assert refused.code == 2 and says in refused.sentence
