"""Tables and pictures of Round Attention's comparison, from hand-made answers."""

from __future__ import annotations

import pytest

from kvjax.eval import round_report as report
from kvjax.eval.round_questions import FULL, Answer, Settings

SETTINGS = Settings("toy", "float32", "file.jsonl", 100, 4, 2)


def answer(policy: str, rounds: int, seconds: tuple[float, ...], full: tuple[float, ...], **changes) -> Answer:
    values = dict(
        dialogue=f"of {rounds}", kind="", asked=0, policy=policy, rounds=rounds, selected=(0,), gold=(0,),
        tokens=(1, 2), right=None, used=10 * rounds, seen=1000, live_bytes=1, full_bytes=2, host_bytes=0,
        moved_bytes=0, seconds=seconds, full_seconds=full,
    )  # fmt: skip
    values |= changes
    return Answer(**({"agrees": len(values["tokens"])} | values))


def both(rounds: int, seconds: tuple[float, ...], full: tuple[float, ...], **changes) -> list[Answer]:
    return [answer(FULL, rounds, full, full), answer("round", rounds, seconds, full, **changes)]


def test_a_turns_time_is_the_median_of_ratios_side_by_side():
    # The machine was ten times slower the second time: ratios say so of neither.
    found = answer("round", 5, (0.5, 6.0, 0.7), (1.0, 10.0, 1.0))
    assert found.turn == pytest.approx(0.6)
    answers = both(5, (0.5,), (1.0,)) + both(20, (2.0,), (1.0,)) + both(60, (0.1,), (1.0,), tokens=(1,))
    ratios = report.turn_ratios(answers)
    assert ratios["of 5", 0, "round"] == 0.5 and ratios["of 60", 0, FULL] == 1.0
    assert ("of 60", 0, "round") not in ratios, "a shorter answer takes less time whatever the cache"
    full, one = report.summary(answers)
    assert full["turn"] == 1.0 and one["turn"] == pytest.approx(1.25)
    assert report.table(answers).cells[1][-1] == "1.25"
    slow = both(90, (9.0,), (1.0,))
    assert report.summary(answers + slow)[1]["turn"] == 2.0, "one slow question is not all of them"
    assert "(2 of 3)" in report.footnote(SETTINGS, answers, {"versions": {}, "processor": "", "cores": 2, "date": ""})


def test_the_footnote_counts_the_questions_of_the_table():
    answers = both(5, (0.5,), (1.0,)) + both(20, (2.0,), (1.0,))
    answers.append(answer("round:top=0.3", 5, (0.5,), (1.0,)))  # asked of the first dialogue alone
    said = report.footnote(SETTINGS, answers, {"versions": {}, "processor": "", "cores": 2, "date": ""})
    assert "1 question after 1 dialogue of" in said and "(2 of 2)" in said


def test_no_time_without_an_answer_of_equal_length():
    (_, one) = report.summary(both(5, (0.5,), (1.0,), tokens=(1,)))
    assert one["turn"] is None


def test_agreement_is_of_each_answers_own_tokens():
    """Half of four tokens, none of two, and an answer without any, which agrees in its first."""
    answers = both(3, (0.5,), (1.0,), tokens=(1, 2, 3, 4), agrees=2)
    answers += both(6, (0.5,), (1.0,), agrees=0) + both(9, (0.5,), (1.0,), tokens=())
    _, one = report.summary(answers)
    assert one["tokens agree"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert one["first token"] == pytest.approx(2 / 3)


def test_classes_are_the_papers():
    assert [report.class_of(n) for n in (1, 10, 11, 30, 31, 50, 51, 100, 250)] == [
        *("mini", "mini", "small", "small", "medium", "medium", "large", "large", "large")
    ]


def test_the_picture_has_a_point_for_every_class():
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    answers = both(4, (0.5,), (1.0,)) + both(6, (0.7,), (1.0,)) + both(40, (0.3,), (1.0,))
    left, right = report.turns_figure(SETTINGS, answers).axes
    (line,) = (container.lines[0] for container in left.containers)
    assert list(line.get_xdata()) == [5, 40] and list(line.get_ydata()) == pytest.approx([0.6, 0.3])
    assert [text.get_text() for text in left.get_xticklabels()] == ["mini\n5", "medium\n40"]
    assert [list(line.get_ydata()) for line in right.lines] == [[50, 400]] * 2
    assert left.get_legend_handles_labels()[1] == [FULL, "round"]
    late = both(40, (0.3,), (1.0,), tokens=(1,))
    assert not report.turns_figure(SETTINGS, late).axes[0].containers[0].lines[0].get_xdata().size


def test_sizes_on_the_device_are_bytes_and_parts_of_a_full_cache():
    sizes = dict(live_bytes=500, allocated_bytes=750, peak_bytes=1200, full_bytes=1000)
    answers = both(5, (0.5,), (1.0,), **sizes)
    table = report.table(answers)
    full, one = (dict(zip(table.header, cells, strict=True)) for cells in table.cells)
    assert [one[name] for name in ("live", "allocated", "peak")] == [
        "500 B (50.0%)",
        "750 B (75.0%)",
        "1.2 kB (120.0%)",
    ]
    assert full["live"] == "1 B (50.0%)" and full["peak"] == "-", "unknown where nothing measured it"


def test_right_answers_by_type_of_question():
    def asked(rounds: int, kind: str, full: bool | None, compressed: bool | None) -> list[Answer]:
        times = (1.0,), (1.0,)
        return [
            answer(FULL, rounds, *times, kind=kind, right=full),
            answer("round", rounds, *times, kind=kind, right=compressed),
        ]

    answers = asked(5, "user", True, True) + asked(6, "user", True, False) + asked(7, "time", True, True)
    # The question that only the full cache answered does not count, nor one without a known answer.
    answers += asked(8, "time", None, None) + asked(9, "time", False, False)[:1]
    full, one = report.by_question_type(answers)
    types = {"time": (1.0, 1), "user": (1.0, 2), "all": (1.0, 3)}
    expected = {kind: {"right": right, "questions": questions} for kind, (right, questions) in types.items()}
    assert full == {"policy": FULL, "types": expected}
    assert one["types"]["user"] == {"right": 0.5, "questions": 2}
    assert one["types"]["all"]["right"] == pytest.approx(2 / 3)
    made = report.report(SETTINGS, answers, {"versions": {}, "processor": "", "cores": 2, "date": ""})
    assert "| right answers | time (1) | user (2) | all (3) |\n" in made.markdown()
    assert "| round | 1.00 | 0.50 | 0.67 |\n" in made.markdown()
    assert made.data["by question type"] == [full, one]
    assert not report.by_question_type(both(5, (0.5,), (1.0,))), "no table where no answer is known"
