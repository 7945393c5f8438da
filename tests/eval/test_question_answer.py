"""Question and answer over rounds: correlations, their means and the picture."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toys

import kvjax
from kvjax.calibrate.round_attention_mass import question_and_answer_mass
from kvjax.eval.dialogues import Dialogue, read_dialogues
from kvjax.eval.question_answer import LastRound, alike_figure, last_round, means

ROUNDS = (("One?", "Yes, one."), ("And two?", "Two"), ("?", "Three it is."), ("Which?", "The second."))


def shares(question, answer, lengths=(0.25, 0.25, 0.5), name="d") -> LastRound:
    return LastRound(name, np.array(question), np.array(answer), np.array(lengths))


def test_likeness_is_the_correlation_over_rounds():
    rng = np.random.default_rng(0)
    question, answer = rng.dirichlet(np.ones(7), size=(2, 5))
    found = shares(question, answer, rng.dirichlet(np.ones(7)))
    for layer in range(5):
        assert found.alike[layer] == pytest.approx(np.corrcoef(question[layer], answer[layer])[0, 1])
        assert found.as_lengths[layer] == pytest.approx(np.corrcoef(question[layer], found.lengths)[0, 1])
    even = shares([[1 / 3] * 3], [[0.2, 0.3, 0.5]])
    assert even.alike.tolist() == [0.0], "what is the same everywhere is like nothing"


def test_means_over_dialogues():
    same = [[0.2, 0.3, 0.5]]
    alike, error, as_lengths = means([shares(same, same), shares(same, [[0.5, 0.3, 0.2]])])
    assert alike == pytest.approx(1 - (1 + 13 / 14) / 2, abs=0.01) and error[0] > 0.5
    assert as_lengths[0] == pytest.approx(0.945, abs=1e-3)
    assert means([shares(same, same)])[1].tolist() == [0.0]


def test_the_last_round_is_question_and_answer_mass():
    lm = toys.tiny_model()
    found = last_round(lm, Dialogue("d", ROUNDS, (), "S."))
    messages = Dialogue("d", ROUNDS[:3], (), "S.").messages()
    question, answer, lengths = question_and_answer_mass(lm, messages, *ROUNDS[3])
    np.testing.assert_array_equal(found.question, question)
    np.testing.assert_array_equal(found.answer, answer)
    np.testing.assert_array_equal(found.lengths, lengths)
    with pytest.raises(kvjax.UsageError, match="fewer than two rounds"):
        last_round(lm, Dialogue("d", ROUNDS[:2], ()))


def test_the_picture_shows_the_longest_dialogue_and_every_layer():
    pytest.importorskip("matplotlib", reason="the extra eval has it")
    rng = np.random.default_rng(1)
    found = [shares(*rng.dirichlet(np.ones(n), size=(2, 6)), rng.dirichlet(np.ones(n))) for n in (3, 8)]
    *panels, below = alike_figure(found, 3, "toy").axes
    assert [axes.get_title().partition(":")[0] for axes in panels] == ["layer 1", "layer 3", "layer 5", "layer 6"]
    np.testing.assert_array_equal(panels[1].lines[0].get_ydata(), found[1].question[2])
    np.testing.assert_array_equal(panels[1].lines[1].get_ydata(), found[1].answer[2])
    np.testing.assert_allclose(below.containers[0].lines[0].get_ydata(), means(found)[0])
    assert "$L_w$ = 3" in below.get_legend_handles_labels()[1]
    assert len(alike_figure(found[:1], None, "toy").axes) == 5


def test_a_byte_order_mark_before_dialogues_is_no_text(tmp_path):
    path = tmp_path / "told.jsonl"
    messages = [{"role": role, "content": f"{role} {i}."} for i in range(2) for role in ("user", "assistant")]
    line = json.dumps({"messages": [*messages, {"role": "user", "content": "Well?"}]})
    path.write_text(line)
    wanted = read_dialogues(path, len, 1000)
    path.write_text(line, encoding="utf-8-sig")
    assert read_dialogues(path, len, 1000) == wanted
