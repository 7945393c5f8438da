"""``kvjax picture``: a PNG, the numbers beside it, and refusals."""

from __future__ import annotations

import json
import re

import pytest
import toys

import kvjax
from kvjax.eval.compare import Comparison
from kvjax.eval.long_generation import EVICTING, worked_solution
from kvjax.eval.long_generation import policies as slot_policies
from kvjax.eval.results import AFTER, IN_VIEW, Row, Scored
from kvjax.figures import new_figure
from kvjax.output import Score
from kvjax.policies import LagKV, parse


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

    def run(self, entries, lengths):
        held = {row.key for row in self.rows}
        for entry in entries:
            if (lengths[0], entry.name, entry.retained) in held:
                continue
            asked.append(entry)
            if len(asked) == 5:
                raise KeyboardInterrupt
            groups = tuple(Scored(mode, "t", (1.0,), (1,)) for mode in (AFTER, IN_VIEW))
            self.rows.append(Row(lengths[0], entry.name, entry.retained, answers=groups))
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
    drawn = []
    monkeypatch.setattr("kvjax.eval.studies.study_figure", lambda study, rows: drawn.extend(rows) or new_figure(1, 1))
    for length in ("500", "300"):
        drawn.clear()
        assert cli(*command[:-1], length).code == 0
        assert {row.length for row in drawn} == {int(length)} and len(drawn) == 13


def test_a_study_of_nothing_is_no_picture(cli, tmp_path, monkeypatch):
    def interrupted(self, entries, lengths):
        raise KeyboardInterrupt

    def refused(self, entries, lengths):
        groups = tuple(Scored(mode, "t", (1.0,), (1,)) for mode in (AFTER, IN_VIEW))
        first, *others = entries
        self.rows.append(Row(lengths[0], first.name, first.retained, answers=groups))
        self.rows += [Row(lengths[0], one.name, one.retained, refused="It has no profile.") for one in others]

    command = ("picture", "razor-heads", "--out", str(tmp_path / "heads.png"), "--length", "300")
    monkeypatch.setattr(Comparison, "run", interrupted)
    ran = cli(*command)
    assert ran.code == 130 and "nothing was measured yet" in ran.err
    monkeypatch.setattr(Comparison, "run", refused)
    ran = cli(*command)
    assert ran.code == 2 and "It has no profile." in ran.sentence
    assert not list(tmp_path.iterdir())


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
        ((), "give --dialogues a file of them."),
        (("--dialogues", str(told), "--least-rounds", "5"), "5 rounds"),
        (("--dialogues", str(told), "--least-rounds", "2"), "--least-rounds is 2"),
        (("--dialogues", str(told), "--most", "0"), "--most is 0"),
    ):
        refused = cli(*command, *options)
        assert refused.code == 2 and says in refused.sentence


@pytest.mark.parametrize("slots", [33, 90, 512, 900])
def test_every_policy_of_a_long_answer_can_have_so_many_slots(slots):
    """LagKV's partitions get smaller where those of its default would leave nothing to choose."""
    made = [parse(text) for text in slot_policies(slots)]
    assert [type(policy) for policy in made] == [type(parse(name)) for name in EVICTING]
    assert {policy.budget for policy in made} == {slots}
    (lagkv,) = (policy for policy in made if isinstance(policy, LagKV))
    assert lagkv.lag == min(max(2, slots // 4), 128)


@pytest.mark.parametrize("policies", [("streamingllm", "h2o"), pytest.param(EVICTING, marks=pytest.mark.slow)])
def test_a_long_answer_under_policies_that_evict(cli, tmp_path, policies):
    """The full cache's losses are those that score gives; a policy with a slot for every token loses nothing."""
    command = ("picture", "long-generation", "--out", str(tmp_path / "long.png"), "--tokens", "200")
    command += () if policies is EVICTING else ("--policies", ";".join(policies))
    ran = cli(*command, "--slots", "900")
    assert ran.code == 0, ran.err
    assert (tmp_path / "long.png").read_bytes().startswith(b"\x89PNG") and "in the last quarter" in ran.out
    first, *others = json.loads((tmp_path / "long.json").read_text())["rows"]
    assert first["policy"] == "full" and len(first["losses"]) == 200 and min(first["losses"]) >= 0
    assert [row["policy"] for row in others] == [f"{name}:budget=900" for name in policies]
    for row in others:
        assert row["losses"] == pytest.approx(first["losses"], abs=1e-4), row["policy"]
    assert "fed 200 tokens" not in cli(*command, "--slots", "900").err, "nothing is measured again"
    fewer = ("picture", "long-generation", "--out", str(tmp_path / "fewer.png"), "--tokens", "200", "--slots", "90")
    fewer += () if policies is EVICTING else ("--policies", ";".join(policies))
    assert cli(*fewer).code == 0
    first, *others = json.loads((tmp_path / "fewer.json").read_text())["rows"]
    for row in others:
        assert row["losses"] != pytest.approx(first["losses"], abs=1e-4), row["policy"]
    assert cli(*fewer, "--policies", "h2o:recent=8").code == 0
    assert json.loads((tmp_path / "fewer.json").read_text())["rows"][-1]["policy"] == "h2o:recent=8,budget=90"
    for options, says in (
        (("--slots", "90"), "losses with slots 900, and 90 is asked for; choose another --out."),
        (("--slots", "900", "--tokens", "1000000000"), "context is"),
        (("--slots", "2"), "budget of 2"),
        (("--slots", "0"), "slots is 0"),
        (("--slots", "900", "--text", "too short"), "200 are asked for"),
    ):
        refused = cli(*command, *options)
        assert refused.code == 2 and says in refused.sentence, refused.sentence


def test_numbers_of_other_weights_are_not_taken_for_the_models(cli, tmp_path, monkeypatch):
    """A model that was trained on has the name and the shape that it had."""
    studied = ("picture", "slimkv-scores", "--out", str(tmp_path / "scores.png"), "--length", "300")
    long = ("picture", "long-generation", "--out", str(tmp_path / "long.png"), "--tokens", "20", "--slots", "90")
    groups = tuple(Scored(mode, "t", (1.0,), (1,)) for mode in (AFTER, IN_VIEW))

    def run(self, entries, lengths):
        self.rows = [Row(lengths[0], one.name, one.retained, answers=groups) for one in entries]
        self._save(self.rows)

    monkeypatch.setattr(Comparison, "run", run)
    scores = [Score((1, 2), (-0.5, -0.5), (1, 2))]
    monkeypatch.setattr("kvjax.eval.long_generation.score", lambda *_, **__: scores[0])
    for command in (studied, long):
        assert cli(*command).code == 0 and cli(*command).code == 0
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: toys.tiny_model(seed=9))
    for command in (studied, long):
        refused = cli(*command)
        assert refused.code == 2 and ("parameters" in refused.sentence or "of other weights" in refused.sentence)


def test_numbers_of_a_worked_solution_are_right_and_come_back():
    text = worked_solution(60, seed=3)
    held = {name: int(count) for name, count in re.findall(r"(\w+) has (\d+)", text.splitlines()[0])}
    assert len(held) == 20
    for line in text.splitlines()[1:]:
        giver, had, taker, other = re.search(r"(\w+) had (\d+) and (\w+) had (\d+)", line).groups()
        count = int(re.search(r"gives (\d+)", line)[1])
        assert held[giver] == int(had) and held[taker] == int(other) and count > 0
        held[giver] -= count
        held[taker] += count
        assert (
            line.endswith(f"{taker} has {other} + {count} = {held[taker]}.") and f"- {count} = {held[giver]} " in line
        )
    assert min(held.values()) >= 0


@pytest.mark.parametrize(
    ("name", "option", "value", "others"),
    [
        ("razor-heads", "--policies", "h2o", "long-generation"),
        ("lagkv-variants", "--ratio", "0.5", "retained-positions"),
        ("retained-positions", "--least-rounds", "9", "question-answer"),
        ("slimkv-scores", "--text", "a", "retained-positions and long-generation"),
        ("question-answer", "--slots", "64", "long-generation"),
    ],
)
def test_options_of_other_pictures_are_refused(cli, tmp_path, name, option, value, others):
    refused = cli("picture", name, "--out", str(tmp_path / "x.png"), option, value)
    assert refused.code == 2 and f"{option} is for {others}; leave it out for {name}" in refused.sentence
