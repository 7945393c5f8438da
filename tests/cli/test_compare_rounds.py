"""``kvjax compare-rounds``: answers of every strategy from the same rounds, saved and gone on with."""

from __future__ import annotations

import dataclasses
import json

import pytest
import toys

import kvjax
from kvjax.checkpoints.digest import weights_digest
from kvjax.eval.round_questions import Settings, read_answers


@pytest.fixture
def four_layers(monkeypatch):
    lm = toys.tiny_model(num_layers=4)
    monkeypatch.setattr(kvjax, "load", lambda *args, **options: lm)
    return lm


def told(path, topics=("Bees", "Tea", "Rain")):
    turns = "".join(f"USER: I would like to discuss the topic of {topic}. \n ASSISTANT: Go on. \n " for topic in topics)
    record = f"Now the record start. {turns}Now the record ends. First?"
    path.write_text(json.dumps({"prompt": record, "topics": list(topics)}) + "\n")
    return path


def test_another_file_of_the_same_name_is_not_continued(tmp_path):
    settings = Settings("toy", "float32", "d.jsonl", 500, 4, 1, "abc")
    saved = {"settings": dataclasses.asdict(settings), "answers": []}
    (tmp_path / "answers.json").write_text(json.dumps(saved))
    assert read_answers(tmp_path / "answers.json", settings) == []
    with pytest.raises(kvjax.KvjaxError, match="holds answers of another file of dialogues; choose another --out"):
        read_answers(tmp_path / "answers.json", dataclasses.replace(settings, digest="def"))
    with pytest.raises(kvjax.KvjaxError, match="holds answers of other weights; choose another --out"):
        read_answers(tmp_path / "answers.json", dataclasses.replace(settings, parameters="def"))
    del saved["settings"]["digest"], saved["settings"]["parameters"]  # as an earlier version wrote it
    (tmp_path / "answers.json").write_text(json.dumps(saved))
    assert read_answers(tmp_path / "answers.json", settings) == []


def test_the_files_bytes_are_among_the_settings(cli, tmp_path, four_layers, monkeypatch):
    from kvjax.cli import compare_rounds

    found = []
    monkeypatch.setattr(compare_rounds, "_compare", lambda lm, names, asked, settings, *_: found.append(settings) or 0)
    for folder, topics in (("a", ("Bees", "Tea")), ("b", ("Rain", "Tea"))):
        (tmp_path / folder).mkdir()
        data = told(tmp_path / folder / "topics.jsonl", topics)
        assert cli("compare-rounds", "--dialogues", str(data), "--out", str(tmp_path / "out")).code == 0
    one, other = found
    assert one.parameters == weights_digest(four_layers.params)
    assert one.digest != other.digest and dataclasses.replace(one, digest=other.digest) == other


def test_what_ends_a_run_before_its_first_answer_is_said(cli, tmp_path, four_layers, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.eval.round_questions.history_ids", interrupted)
    out, data = tmp_path / "out", told(tmp_path / "topics.jsonl")
    ran = cli("compare-rounds", "--dialogues", str(data), "--out", str(out), "--policies", "round:watershed=2")
    assert ran.code == 130 and "nothing was answered yet" in ran.err
    assert not (out / "answers.json").exists()


def test_a_model_without_a_chat_template_has_no_dialogues(cli, tmp_path, four_layers, monkeypatch):
    plain = dataclasses.replace(four_layers, tokenizer=toys.byte_tokenizer())
    plain.tokenizer.chat_template = None
    monkeypatch.setattr(kvjax, "load", lambda *args, **options: plain)
    data, out = told(tmp_path / "topics.jsonl"), tmp_path / "toy.yaml"
    for command in (
        ("compare-rounds", "--out", str(tmp_path / "out"), "--policies", "round:watershed=2"),
        ("calibrate", "watershed", "--out", str(out), "--least-rounds", "2"),
    ):
        ran = cli(*command, "--dialogues", str(data))
        assert ran.code == 2 and "this model has none" in ran.sentence
    assert [file.name for file in tmp_path.iterdir()] == ["topics.jsonl"]


@pytest.mark.slow
def test_every_strategy_answers_from_the_same_rounds_and_a_second_run_goes_on(cli, tmp_path, four_layers):
    out, data = tmp_path / "out", told(tmp_path / "topics.jsonl")
    common = ("compare-rounds", "--dialogues", str(data), "--out", str(out), "--max-new-tokens", "3", "--repeats", "2")
    policies = "round:watershed=2,top=1;round:watershed=2"
    ran = cli(*common, "--policies", policies, "--markdown")
    assert ran.code == 0 and "dialogue 1 of 1" in ran.err
    lines = ran.out.partition("\n\n")[0].splitlines()
    rows = [line.split(" | ") for line in lines][1:]
    by_name = {row[0].removeprefix("| "): row[1:] for row in rows}
    full, every, one = (by_name[name] for name in ("full", *policies.split(";")))
    assert full[0] == every[0] == "3.0 of 3.0" and one[0] == "1.0 of 3.0"
    # All rounds selected is the full cache; it finds every gold round.
    assert every[1:5] == ["1.00"] * 4 and every[5] == full[5] and every[6] == full[6]
    live = [float(row[6].partition("(")[2].rstrip("%)")) for row in (full, every, one)]
    assert live[0] == live[1] == 100 > live[2]
    allocated = [float(row[7].partition("(")[2].rstrip("%)")) for row in (full, every, one)]
    assert all(most >= least for most, least in zip(allocated, live, strict=True))
    # The record's own question asks for the first topic by name.
    assert "| right answers | first topic (1) | all (1) |" in ran.out
    # Every question was asked twice of every cache in turn; the full cache's own time is 1.
    assert full[-1].rstrip(" |") == "1.00" and float(one[-1].rstrip(" |")) > 0
    answers = json.loads((out / "answers.json").read_text())["answers"]
    assert all(len(answer["seconds"]) == len(answer["full_seconds"]) == 2 for answer in answers)
    assert len(answers) == 3 * 4 and (out / "rounds.md").read_text() == ran.out
    again = cli(*common, "--policies", policies)
    assert again.code == 0 and json.loads((out / "answers.json").read_text())["answers"] == answers
    more = cli(*common, "--policies", f"{policies};round:watershed=3,top=1")
    found = json.loads((out / "answers.json").read_text())["answers"]
    assert more.code == 0 and found[: len(answers)] == answers and len(found) == 4 * 4
    assert len(found[-1]["full_seconds"]) == 2, "timed beside the full cache, which was asked again"
    # Of another watershed: all rounds are the full cache again, and fewer layers are in host memory.
    assert found[-1]["agrees"] == len(found[-1]["tokens"]) and found[-1]["host_bytes"] < answers[-1]["host_bytes"]
    other = cli(*common, "--policies", policies, "--max-new-tokens", "4")
    assert other.code == 2 and other.sentence.endswith("and 4 is asked for; choose another --out.")
    assert f"holds answers with max_new_tokens {len(answers[0]['tokens'])}" in other.sentence


@pytest.mark.slow
def test_turns_after_so_many_rounds_are_drawn(cli, tmp_path, four_layers):
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    out, drawn = tmp_path / "out", tmp_path / "turns.png"
    data = told(tmp_path / "topics.jsonl", ("Bees", "Tea", "Rain", "Sea"))
    options = ("--rounds", "2,4,9", "--policies", "round:watershed=2", "--max-new-tokens", "2", "--repeats", "1")
    ran = cli("compare-rounds", "--dialogues", str(data), "--out", str(out), "--picture", str(drawn), *options)
    assert ran.code == 0, ran.err
    asked = {
        (answer["dialogue"], answer["rounds"], answer["asked"])
        for answer in json.loads((out / "answers.json").read_text())["answers"]
    }
    # After two rounds the questions about the other two topics have no answer, and no record has nine.
    assert sorted(rounds for _, rounds, _ in asked) == [2] * 3 + [4] * 5
    assert {name for name, _, _ in asked} == {"topics-0:2", "topics-0:4"}
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, says",
    [
        (("--rounds", "1"), "--rounds is 1"),
        (("--rounds", "9"), "9 rounds"),
        (("--repeats", "0"), "--repeats is 0"),
        (("--picture", "no/such/folder/x.png"), "--picture"),
        (("--policies", "lagkv"), "RoundAttention without inner"),
        (("--policies", "round:inner=lagkv"), "RoundAttention without inner"),
        (("--dialogues", "none.json"), "does not exist"),
        (("--most", "0"), "--most is 0"),
        (("--max-new-tokens", "0"), "--max-new-tokens is 0"),
        (("--tokens", "3"), "3 tokens"),
    ],
)
def test_bad_requests_are_one_sentence(cli, tmp_path, four_layers, options, says):
    data = told(tmp_path / "topics.jsonl")
    ran = cli("compare-rounds", "--dialogues", str(data), "--out", str(tmp_path / "out"), *options)
    assert ran.code == 2 and says in ran.sentence


def test_compare_of_token_policies_names_the_command_for_rounds(cli, tmp_path):
    ran = cli("compare", "--policies", "round:watershed=1", "--out", str(tmp_path / "out"))
    assert ran.code == 2 and "compare-rounds" in ran.sentence


@pytest.mark.slow
def test_chat_of_rounds_shows_what_a_turn_selected(four_layers, capsys):
    from kvjax.tables import stats_rows

    chat = kvjax.Chat(four_layers, policy="round:watershed=2", max_new_tokens=2)
    chat.send("one")
    shown = dict(stats_rows(chat.send("two")))
    assert shown["rounds seen"].startswith("1 of 1;") and "for this question" in shown["from the host"]
