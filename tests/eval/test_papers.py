"""The papers' tables and figures: what is measured, resumed, reported, and each paper's own numbers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import toys
from support.groups import groups, together
from support.suite_runs import QuickAsker

from kvjax.errors import UsageError
from kvjax.eval.entries import REFERENCE
from kvjax.eval.papers import extras, papers_report
from kvjax.eval.papers import measured as measuring
from kvjax.eval.papers.measured import Options, measured
from kvjax.eval.papers.paper import published, same
from kvjax.eval.papers.registry import PAPERS, find_papers, grounds
from kvjax.eval.positions import Retained
from kvjax.eval.suites import runner
from kvjax.eval.suites.data import DataFolder
from kvjax.eval.suites.registry import SUITES
from kvjax.runtime import distributed
from kvjax.runtime.distributed import Group

MACHINE = {"processor": "x", "cores": 2, "versions": {"jax": "1"}, "date": "2026-01-01T00:00"}
SEEDS = {"razor": "000", "round": "001", "ahakv": "002", "lagkv": "004"}


def options(**changes) -> Options:
    usual = dict(quick=True, length=None, limit=None, seed=42, storage="model", batch_size=2)
    return Options("needles", None, None, **(usual | changes))


@pytest.fixture(scope="module")
def lm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.clear_caches", lambda: None)
        yield toys.needle_model()


def small():
    """SlimKV's paper with fewer caches: each has programs to compile."""
    paper = PAPERS["slimkv"]
    ablation, methods, longbench = paper.studies
    ablation = dataclasses.replace(ablation, quick=("SlimKV (S1 x S2), 0.25", "without S2, 0.25"))
    return dataclasses.replace(
        paper, studies=(ablation, dataclasses.replace(methods, quick=("SlimKV, 0.25",)), longbench)
    )


def run(lm, out, papers, data=None, stop_at=None, **changes):
    folder = DataFolder(data)
    found = measured(papers, out, options(**changes), folder)
    for one in found:
        one.prepare(lm, folder, lambda _: None)
        kept, add = [], one.journal.add if one.journal else None

        def counted(answer, kept=kept, add=add):
            if len(kept) == stop_at:
                raise KeyboardInterrupt
            kept.append(answer)
            add(answer)

        if one.journal:
            one.journal.add = counted
    try:
        for one in found:
            one.run()
    except KeyboardInterrupt:
        pass
    finally:
        for one in found:
            one.close()
    return papers_report.write(out, papers, found, {}, options(**changes), lm.name, MACHINE), found


def test_every_study_is_of_known_things():
    for paper in PAPERS.values():
        assert len({study.name for study in paper.studies}) == len(paper.studies)
        for study in paper.studies:
            ground = study.ground
            suite = SUITES[ground.suite]
            assert set(ground.tasks) <= set(suite.tasks) and set(ground.quick_tasks) <= set(suite.tasks)
            assert set(study.quick) <= set(study.caches)
            for cache in study.caches.values():
                cache.policy()
            if study.beside:
                labels = {label for _, label, _ in paper.table(study.beside[0]).rows}
                assert set(study.chosen(False)) <= labels and study.beside[1] in paper.table(study.beside[0]).columns


def test_quick_is_a_dozen_and_a_half_caches():
    """What takes minutes is compiling each cache's programs."""
    count = 0
    for ground in grounds(list(PAPERS.values())):
        studies = [study for paper in PAPERS.values() for study in paper.studies if study.ground == ground]
        count += len({cache for study in studies for cache in study.chosen(True).values()})
    assert count <= 20


@pytest.mark.parametrize("name", SEEDS)
def test_numbers_are_as_the_paper_prints_them(name):
    """Against the paper's own text, where that is at hand."""
    folder = Path(os.environ.get("KVJAX_PAPERS", "/nowhere"))
    files = sorted(folder.glob(f"{SEEDS[name]}_*.txt"))
    if not files:
        pytest.skip("KVJAX_PAPERS names no folder with the papers' text")
    words = re.sub(r"[$\\{}]|text", " ", files[0].read_text())
    printed = set(re.findall(r"\d+(?:\.\d+)?", words))
    for table in PAPERS[name].published:
        for _, _, values in table.rows:
            missing = [value for value in values if value != "-" and value.removesuffix("%") not in printed]
            assert not missing, (table.source, values)


def test_a_table_is_read_by_model_and_label():
    table = published("Table 9", "t", "a, b", "Qwen2.5-0.5B | x | 1 2%\n| y | 3 -\nLlama3-8B-Instruct | x | 5 6")
    assert table.rows[1] == ("Qwen2.5-0.5B", "y", ("3", "-"))
    assert table.value("models/qwen2.5-0.5b.gguf", "x", "b") == "2%"
    assert table.value("meta-llama/Llama3-8B-inst", "x", "a") == "5"
    assert table.value("qwen2.5-coder-0.5b-instruct", "x", "a") is None and table.value("other", "x", "a") is None
    assert same("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b") and not same("qwen2.5-0.5b-instruct", "Qwen2.5-0.5B")
    with pytest.raises(AssertionError, match="Table 9"):
        published("Table 9", "t", "a, b", "m | x | 1")


def test_papers_that_there_are_not_are_refused():
    assert [paper.name for paper in find_papers(("lagkv", "razor"))] == ["lagkv", "razor"]
    with pytest.raises(UsageError, match="papers has no task 'x'; it has razor, round, ahakv, slimkv, lagkv"):
        find_papers(("x",))
    with pytest.raises(UsageError, match="named twice"):
        find_papers(("razor", "razor"))


def test_a_paper_is_measured_resumed_and_reported(lm, tmp_path):
    part, _ = run(lm, tmp_path, [small()], stop_at=3)
    told = part.data["papers"][0]["studies"]
    assert sum(row["answered"] for row in told[0]["rows"]) == 3, "two rows of the full cache and one of another"
    whole, found = run(lm, tmp_path, [small()])
    (told,) = whole.data["papers"]
    ablation, methods, longbench = told["studies"]
    assert [row["label"] for row in ablation["rows"]] == [
        "full cache", "SlimKV (S1 x S2), 0.25", "without S2, 0.25",
    ]  # fmt: skip
    assert all(row["answered"] == 2 for study in (ablation, methods) for row in study["rows"])
    assert ablation["rows"][0]["first token as full"] == 1 and ablation["rows"][0]["difference"] is None
    assert ablation["rows"][1]["difference"]["p"] > 0 and 0.2 < ablation["rows"][1]["live_share"] < 0.5
    assert ablation["rows"][1] == methods["rows"][1] | {"label": "SlimKV (S1 x S2), 0.25"}, "asked once"
    assert longbench["not measured"] == "Left out by --quick."
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    for words in (
        "The paper's Table 3: ablation",
        "29.78",
        "27.32",
        "No counterpart here",
        "asked in view of the comp",
    ):
        assert words in text and words.replace("'", "&#x27;") in page
    assert page.count("data:image/png") == 2 == len(list(tmp_path.glob("slimkv-*.png"))) and "://" not in page
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(whole.data))
    answers = {one.ground.name: len(one.journal.answers) for one in found if one.journal}
    assert answers == {"needles-in-view": 2 * 3}
    with pytest.raises(UsageError, match="seed 42, and 3 is asked for"):
        measured([small()], tmp_path, options(seed=3), DataFolder(None))


def test_what_has_no_data_is_said(lm, tmp_path):
    found = measured(find_papers(("lagkv",)), tmp_path, options(quick=False), DataFolder(None))
    absent = {one.ground.name: one.absent for one in found}
    assert absent["needles"] == "" and "give --data DIR with paulgraham" in absent["passkey"]
    for one in found:
        one.close()
    given = tmp_path, find_papers(("lagkv",)), found, {}, options(quick=False), lm.name, MACHINE, ["a/b.json"]
    written = papers_report.write(*given)
    assert "Text: a/b.json." in (tmp_path / "report.md").read_text() and written.data["files"] == ["a/b.json"]
    told = {study["study"]: study["not measured"] for study in written.data["papers"][0]["studies"]}
    assert "paulgraham" in told["passkey"] and told["ruler"] == "Nothing is answered yet."


def test_a_number_stands_beside_ours_where_the_model_is_the_same(lm, tmp_path):
    from support.suite_runs import answer

    paper = PAPERS["razor"]
    found = measured([paper], tmp_path, options(), DataFolder(None))
    (needles,) = [one for one in found if one.ground.name == "needles"]
    needles.prepare(lm, DataFolder(None), lambda _: None)
    for cache in needles.caches:
        for item in needles.items:
            made = answer(item, text=item.answers[0])
            needles.journal.add(type(made)(**{**vars(made), "policy": cache.name, "retained": cache.retained}))
    needles.close()
    study = paper.studies[0]
    for model, expected in (("qwen1.5-7b-chat", ["87.05", "69.54", "86.59"]), ("other", [None] * 3)):
        rows = papers_report.rows_of(study, needles, model, paper, True)
        assert [row.paper for row in rows] == expected and rows[0].line.policy == REFERENCE
        assert ("the paper's" in papers_report.study_table(study, rows).header) == (model != "other")


def test_two_processes_share_the_questions_of_every_ground(lm, tmp_path, monkeypatch):
    """Threads, which answer without a model; what one of them alone refuses is refused by both."""
    mine, answered, begun = threading.local(), {}, threading.Barrier(2)

    class Meeting(QuickAsker):
        """Waits with its first answer until the other process has a question too."""

        def answers(self, entry, batch, policy):
            if not mine.met:
                mine.met = True
                begun.wait(60)
            return super().answers(entry, batch, policy)

    def own_group():
        """The process' next group, of the same name in both."""
        mine.count += 1
        found = Group(mine.process, 2, mine.store)
        found._name = f"ground {mine.count}"
        return found

    monkeypatch.setattr(measuring, "group", own_group)
    monkeypatch.setattr(runner, "Asker", Meeting)
    monkeypatch.setattr(distributed, "_CHECK", 0.0)
    paper = PAPERS["razor"]

    def process(group, unlike=False):
        number = group.process
        mine.process, mine.store, mine.count, mine.met = number, group._client, 0, False
        data = DataFolder(None)
        found = measured([paper], tmp_path / str(unlike), options(), data)
        try:
            with group.together():
                for one in found:
                    if unlike and number:
                        monkeypatch.setattr(one, "_asked", dataclasses.replace(one._asked, length=8))
                    one.prepare(lm, data, lambda _: None)
                for one in found:
                    one.run()
        finally:
            for one in found:
                one.close()
        answered[number] = sum(one.answered for one in found)
        if number == 0:
            answered["all"] = sum(len(one.journal.answers) for one in found if one.journal)
            answered["missing"] = sum(one.missing - len(one.refused) * len(one.items) for one in found)

    first, second = groups(2)
    assert together([lambda: process(first), lambda: process(second)]) == [None, None]
    assert answered["all"] == answered[0] + answered[1] > 0 and min(answered[0], answered[1]) > 0
    assert answered["missing"] == 0 and not list((tmp_path / "False").rglob("*process*"))
    first, second = groups(2)
    raised = together([lambda: process(first, True), lambda: process(second, True)])
    assert all("Process 1" in str(error) for error in raised), raised


def test_watershed_and_heads_of_a_model_without_profile(lm, tmp_path):
    assert "kvjax calibrate watershed" in extras.watershed(lm).parts[0]
    assert "kvjax calibrate retrieval-heads" in extras.retrieval_heads(lm).parts[0]
    found = extras.rounds(lm, DataFolder(None), tmp_path, True, MACHINE, lambda _: None)
    assert "give --data DIR with one of longmemeval/" in found.parts[0] and not found.images


@pytest.mark.slow
def test_kept_positions_are_drawn_once(lm, tmp_path, monkeypatch):
    said = []
    first = extras.positions(lm, tmp_path, True, said.append)
    assert len(said) == 2 and first.images["ahakv-positions.png"].startswith(b"\x89PNG")
    assert set(first.data["mean position"]) == {"h2o:recent=32,ratio=0.25", "ahakv:recent=32,ratio=0.25"}
    assert extras.positions(lm, tmp_path, True, said.append).parts == first.parts and len(said) == 2
    asked = json.loads((tmp_path / "positions.json").read_text())["asked"]
    assert asked["numbers"] == lm.params.number_format, "another dtype keeps others"
    kept: list[Retained] = []
    monkeypatch.setattr(extras, "retained_positions", lambda *_: kept.pop())
    for number, content in enumerate(("{nonsense", json.dumps({"asked": asked, "mean position": {"h2o": "x"}}))):
        (tmp_path / "positions.json").write_text(content)
        kept += [Retained(name, np.ones((2, 8), np.float32)) for name in ("a", "b")]
        extras.positions(lm, tmp_path, True, said.append)
        assert len(said) == 4 + 2 * number


@pytest.mark.slow
def test_dialogues_of_the_data_folder_are_asked(tmp_path):
    lm = toys.needle_model(num_layers=4, max_position=2048)
    (tmp_path / "longchat").mkdir()
    rounds = " ".join(f"USER: I would like to discuss the topic of {name}. \n ASSISTANT: Yes. \n" for name in "abc")
    row = {"prompt": f"Record. {rounds} Now the record ends. What is the first topic?", "topics": ["a", "b", "c"]}
    (tmp_path / "longchat" / "topics_5.jsonl").write_text(json.dumps(row) + "\n")
    found = extras.rounds(lm, DataFolder(tmp_path), tmp_path / "out", True, MACHINE, lambda _: None)
    assert found.parts, found
