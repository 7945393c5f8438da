"""The journal of a run, and the report made of it."""

from __future__ import annotations

import dataclasses
import html.parser
import json
from types import SimpleNamespace

import pytest
from support.suite_runs import CACHES, ITEMS, SETTINGS, answer, journal_at, without_times

from kvjax.errors import UsageError
from kvjax.eval.comparison_report import footnote
from kvjax.eval.entries import Entry
from kvjax.eval.results import Settings
from kvjax.eval.suites import folder
from kvjax.eval.suites.figures import heat_map, scores_figure, task_figure
from kvjax.eval.suites.item import Suite
from kvjax.eval.suites.journal import Journal
from kvjax.eval.suites.runner import IN_VIEW
from kvjax.eval.suites.scores import lines, span
from kvjax.eval.suites.suite_report import _by_name

MACHINE = {"processor": "x", "cores": 2, "versions": {"jax": "1"}, "date": "2026-01-01T00:00"}
SUITE = Suite("ruler", "A & <title>", ("a", "b"), "About it.", lambda *_: [], lambda *_: None, heat_map=True)


def report(out, journal, caches=CACHES):
    found = lines(ITEMS, journal, caches, {})
    return folder.write(out, SUITE, journal.settings, found, MACHINE), found


# --- the journal ----------------------------------------------------------------------------------------------


def test_a_journal_is_read_back_and_gone_on_with(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    first = journal_at(path)
    first.add(answer(ITEMS[0], text="\u2028 is no line's end, nor is\n"))
    first.add(dataclasses.replace(answer(ITEMS[0]), text="ignored: it has one"))
    first.close()
    second = journal_at(path)
    assert list(second.answers) == [("full", None, "a/0")]
    second.add(answer(ITEMS[1]))
    second.close()
    assert len(path.read_bytes().split(b"\n")) == 4 and len(Journal(path, SETTINGS).answers) == 2


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "answers.jsonl"
    whole = journal_at(path)
    for item in ITEMS[:3]:
        whole.add(answer(item))
    whole.close()
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    torn = journal_at(path)
    assert [key[2] for key in torn.answers] == ["a/0", "a/1"]
    torn.add(answer(ITEMS[2]))
    torn.close()
    assert path.read_bytes() == content
    path.write_bytes(content[: content.index(b"\n") - 2])  # the settings themselves are torn
    again = journal_at(path)
    again.close()
    assert not again.answers and len(without_times(path)) == 1


def test_what_follows_a_torn_line_is_whole(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal_at(path).close()
    path.write_bytes(path.read_bytes() + b'{"policy": "full", "text": "' + b"long " * 200)
    again = journal_at(path)
    again.add(answer(ITEMS[0]))
    again.close()
    assert len(without_times(path)) == 2


def test_other_settings_and_other_files_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal_at(path).close()
    for change, sentence in (
        ({"seed": 3}, "with seed 42, and 3 is asked for"),
        ({"length": None}, "length 64, and none"),
        ({"tasks": ("a",)}, "tasks a, b, and a is"),
        ({"mode": IN_VIEW}, "mode after, and in view"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Journal(path, dataclasses.replace(SETTINGS, **change))
    with pytest.raises(UsageError, match="questions digest, and another"):
        Journal(path, SETTINGS).begin("another")
    path.write_bytes(path.read_bytes() + b'{"policy": 3}\n')
    with pytest.raises(UsageError, match="line 2 is no line of a journal"):
        Journal(path, SETTINGS)
    path.write_bytes(b'{"format": 0}\n')
    with pytest.raises(UsageError, match="not written by this version"):
        Journal(path, SETTINGS)


# --- the report -----------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def filled(path):
    journal = journal_at(path)
    for number, item in enumerate(ITEMS):
        journal.add(answer(item, text="RED" if number else "blue"))
        journal.add(answer(item, "streamingllm", "r" if number % 2 else "red"))
    journal.close()
    return journal


def test_scores_worked_out_by_hand(tmp_path):
    _, (full, other) = report(tmp_path, filled(tmp_path / "answers.jsonl"))
    # full: "blue" holds e alone. Task a: (0.5 + 1 + 1) / 3, task b: 1.
    assert full.score.mean == pytest.approx((2.5 / 3 + 1) / 2)
    # The other: a: (1 + 0 + 1) / 3, b: (0 + 1) / 2.
    assert other.score.mean == pytest.approx((2 / 3 + 0.5) / 2)
    assert other.gap.mean == pytest.approx(other.score.mean - full.score.mean) and full.gap is None
    assert other.live_fraction == 0.5 and full.read_rate == pytest.approx(20 / 0.5) and full.decode_rate == 2 / 0.25


def test_the_page_is_one_file(tmp_path):
    shown, _ = report(tmp_path, filled(tmp_path / "answers.jsonl"))
    text = (tmp_path / folder.PAGE).read_text()
    page = Page(text)
    assert page.open == [] and ("viewport", "width=device-width, initial-scale=1") in [
        (attrs.get("name"), attrs.get("content")) for _, attrs in page.tags
    ]
    sources = [attrs["src"] for _, attrs in page.tags if "src" in attrs]
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not [tag for tag, attrs in page.tags if "href" in attrs or tag in ("script", "link", "iframe")]
    assert "://" not in text and "A & <title> (tiny)" in page.text
    tables = [place for place, (tag, _) in enumerate(page.tags) if tag == "table"]
    assert len(tables) == 2 and all(page.tags[place - 1] == ("div", {"class": "table"}) for place in tables)
    for name in ("heat-map.png", "tasks.png", "scores.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (tmp_path / folder.MARKDOWN).read_text()
    held = json.loads((tmp_path / folder.NUMBERS).read_text())
    assert held == json.loads(json.dumps(shown.data)) and [cache["policy"] for cache in held["caches"]] == [
        "full",
        "streamingllm",
    ]
    assert held["caches"][1]["by task"]["b"]["mean"] == 50


def test_the_page_says_which_text_was_read_and_what_no_answer_can_score(tmp_path):
    journal = filled(tmp_path / "answers.jsonl")
    empty = [dataclasses.replace(ITEMS[0], answers=("",)), *ITEMS[1:]]
    for items, files in ((ITEMS, ()), (empty, ("longbench/trec.jsonl", "a/b.json"))):
        shown = folder.write(tmp_path, SUITE, journal.settings, lines(items, journal, CACHES, {}), MACHINE, files)
        text = (tmp_path / folder.MARKDOWN).read_text()
        assert ("Text: longbench/trec.jsonl, a/b.json. About it." in text) == bool(files)
        assert ("About it. 1 question has an empty reference:" in text) == bool(files)
        assert shown.data["files"] == list(files)


def test_the_same_answers_give_the_same_report(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        report(tmp_path / name, filled(tmp_path / name / "answers.jsonl"))
    for name in (folder.PAGE, folder.MARKDOWN, folder.NUMBERS):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def journal_of(folder, theirs):
    """The full cache answered the first question, and another cache others."""
    journal = journal_at(folder / "other.jsonl")
    journal.add(answer(ITEMS[0]))
    for item in theirs:
        journal.add(answer(item, "streamingllm"))
    journal.close()
    return journal


def test_a_report_of_a_part(tmp_path):
    journal = journal_at(tmp_path / "answers.jsonl")
    journal.add(answer(ITEMS[0]))
    journal.close()
    found = lines(ITEMS, journal, [*CACHES, Entry("h2o", 0.1)], {("h2o", 0.1): "It refuses <this>."})
    folder.write(tmp_path, SUITE, journal.settings, found, MACHINE)
    other = lines(ITEMS, journal_of(tmp_path, ITEMS[1:]), CACHES, {})[1]
    assert len(other.scored) == 4 and other.gap is None, "no question was answered by both"
    text = (tmp_path / folder.MARKDOWN).read_text()
    assert "| full |  | 1 of 5 | 100.0 | - |" in text and "| streamingllm | 0.5 | 0 of 5 | - |" in text
    assert "It refuses <this>." in text
    page = Page((tmp_path / folder.PAGE).read_text())
    assert "It refuses <this>." in page.text
    cells = [attrs for tag, attrs in page.tags if tag == "td"]
    (note,) = [place for place, attrs in enumerate(cells) if attrs.get("class") == "note"]
    assert note == 11 * 2 + 2 and cells[note]["colspan"] == "9", "the labels, then the sentence in place of numbers"


def test_a_groups_score_is_the_mean_of_its_tasks():
    scored = [("a", 0.0)] * 20 + [("b", 1.0)] * 5
    items = [SimpleNamespace(score=score, item=SimpleNamespace(task=task, groups=("g",))) for task, score in scored]
    line = SimpleNamespace(policy="full", retained=None, scored=items, refused=None)
    shown = _by_name("By group", [line], [("g", "g")], 1)
    assert shown.cells[0][-1].startswith("50.0")


def test_pictures_say_how_long_the_prompts_were(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    found = lines(ITEMS, filled(tmp_path / "answers.jsonl"), CACHES, {})
    for draw in (scores_figure, task_figure):
        (axes,) = draw(found).axes
        assert axes.get_title() == "prompts of 20 tokens"
    panel, *_ = heat_map(found, "prompt with answer, tokens").axes
    assert panel.get_xlabel() == "prompt with answer, tokens"


def test_names_of_policies_stand_whole_above_the_bars():
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    items = [SimpleNamespace(score=1.0, item=SimpleNamespace(task="a"), answer=SimpleNamespace(prompt_tokens=9))]
    names = [f"razor:ratio=0.{n},inner=compactor,induction_share=0.03" for n in (125, 25, 5)]
    drawn = [SimpleNamespace(policy=name, retained=None, scored=items) for name in ("full", *names)]
    figure = task_figure(drawn)
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width, "and not beyond the picture"


def test_one_length_and_one_sample_are_said_as_one():
    assert span(417, 417) == "417" and span(417, 1500) == "417 to 1,500"
    for samples, each, rows in ((1, "1 sample each of", "decode: 1 row."), (8, "8 samples each", "8 rows together.")):
        said = footnote(Settings("m", "float32", samples=samples), MACHINE)
        assert each in said and rows in said
