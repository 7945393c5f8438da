"""Pictures of the papers: what each compares, what is drawn of hand-made results, and positions of a toy model."""

from __future__ import annotations

import numpy as np
import pytest
import toys

from kvjax.errors import UsageError
from kvjax.eval import positions, studies
from kvjax.eval.entries import Entry
from kvjax.eval.positions import Retained, retained_positions
from kvjax.eval.results import AFTER, IN_VIEW, Row, Scored
from kvjax.figures import png


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_point_of_a_study_is_a_policy(name):
    study = studies.STUDIES[name]
    made = [entry.policy() for entry in study.entries]
    assert study.entries[0] == Entry("full")
    assert len(set(made)) == len(made), "no two points are the same cache"
    for line in study.lines.values():
        assert len({x for x, _ in line}) == len(line) >= 4


def row(entry: Entry, after: float, in_view: float) -> Row:
    groups = tuple(Scored(mode, "t", (score,), (1,)) for mode, score in ((AFTER, after), (IN_VIEW, in_view)))
    return Row(700, entry.name, entry.retained, answers=groups)


def test_a_studys_picture_has_a_line_for_every_variant():
    study = studies.STUDIES["lagkv-variants"]
    rows = [row(c, 0.1 * i % 1, 0.9) for i, c in enumerate(study.entries)]
    rows[-1] = Row(700, rows[-1].policy, rows[-1].retained, refused="No.")
    figure = studies.study_figure(study, rows)
    left, right = figure.axes
    assert left.get_legend_handles_labels()[1] == ["full", "LagKV", "LocalKV", "L2 norm"]
    lines = [container.lines[0] for container in left.containers]
    assert list(lines[0].get_xdata()) == [75, 50, 25, 12.5]
    assert list(lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(lines[2].get_xdata()) == 3, "what was refused is left out"
    assert set(right.containers[1].lines[0].get_ydata()) == {0.9}
    assert png(figure).startswith(b"\x89PNG")
    assert left.get_title() == "asked after compression, prompts of 700 tokens"
    assert [axes.get_title() for axes in studies.study_figure(study, []).axes] == [
        "asked after compression",
        "question in view",
    ]


def test_kept_positions_are_the_caches():
    lm = toys.tiny_model()
    tokens = np.random.default_rng(0).integers(0, 250, 90).tolist()
    found = retained_positions(lm, tokens, "h2o:budget=48,recent=8")
    assert found.fraction.shape == (2, 90)
    assert set(np.unique(found.fraction)) <= {0, 0.5, 1}, "two KV heads"
    assert found.fraction.sum(axis=1) == pytest.approx([48, 48])
    assert (found.fraction[:, -8:] == 1).all(), "recent tokens stay"
    with pytest.raises(UsageError, match="does not mark the positions"):
        retained_positions(lm, tokens, "snapkv:budget=48")


def test_mean_positions_and_bins():
    share = np.zeros((2, 10))
    share[:, 9] = 1
    last = Retained("last", share)
    assert last.mean_position == pytest.approx(0.95)
    assert last.binned(5).tolist() == [[0, 0, 0, 0, 0.5]] * 2
    even = Retained("even", np.full((2, 10), 0.25))
    assert even.mean_position == pytest.approx(0.5)
    figure = positions.positions_figure([last, even])
    assert [axes.get_title() for axes in figure.axes[:2]] == [
        "last: mean position 95% of the prompt",
        "even: mean position 50% of the prompt",
    ]
    assert figure.axes[-1].get_legend_handles_labels()[1] == ["last", "even", "evenly spread"]
    assert png(figure).startswith(b"\x89PNG")
