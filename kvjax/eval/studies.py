"""Pictures of the papers, reproduced: accuracy of the needle tasks by one option of one system."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvjax.eval.entries import REFERENCE, Entry
from kvjax.eval.pictures import error_bars, plain_axes
from kvjax.eval.results import AFTER, IN_VIEW, Row, accuracy
from kvjax.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = (0.75, 0.5, 0.25, 0.125)


@dataclasses.dataclass(frozen=True)
class Study:
    """The caches that one picture compares.

    Attributes:
      title: what it shows, and of which paper.
      xlabel: what the policies of a line differ in.
      lines: by label, the place on the axis and the cache of each point.
    """

    title: str
    xlabel: str
    lines: dict[str, tuple[tuple[float, Entry], ...]]

    @property
    def entries(self) -> list[Entry]:
        """The full cache, then every point once."""
        points = (entry for line in self.lines.values() for _, entry in line)
        return list(dict.fromkeys([Entry(REFERENCE), *points]))


def _by_fraction(names: dict[str, str]) -> dict[str, tuple[tuple[float, Entry], ...]]:
    return {
        label: tuple((100 * fraction, Entry(name, fraction)) for fraction in FRACTIONS) for label, name in names.items()
    }


def _razor(options: str, fractions: Sequence[float]) -> tuple[tuple[float, Entry], ...]:
    # At a few hundred tokens the paper's least buffer of 4,000 would drop nothing: only its N / 5 is left.
    name = "razor:threshold=1,compression=5,induction_share={share}{options}"
    return tuple((100 * fraction, Entry(name.format(share=fraction, options=options))) for fraction in fractions)


_HEADS = (0.0, 0.05, 0.08, 0.11, 0.14, 0.25)

STUDIES: dict[str, Study] = {
    "razor-heads": Study(
        "RazorAttention: retrieval heads, echo heads, compensation token (others keep N / 5 tokens)",
        "induction heads protected, % of query heads",
        {
            "with both": _razor("", _HEADS),
            "no echo heads": _razor(",echo_share=0", _HEADS),
            "no compensation token": _razor(",compensation=false", _HEADS),
        },
    ),
    "slimkv-scores": Study(
        "SlimKV: attention (S1), value activation (S2), and their product",
        "retained, % of tokens",
        _by_fraction({"S1 x S2": "slimkv", "S1 only": "slimkv:score=s1", "S2 only": "slimkv:score=s2"}),
    ),
    "lagkv-variants": Study(
        "LagKV: the next partition as reference, its own (LocalKV), and the key's norm (lag 32)",
        "retained, % of tokens",
        _by_fraction(
            {
                "LagKV": "lagkv:lag=32",
                "LocalKV": "lagkv:lag=32,variant=local",
                "L2 norm": "lagkv:lag=32,variant=l2",
            }
        ),
    ),
}


def study_figure(study: Study, rows: Sequence[Row]) -> Figure:
    """Accuracy by the study's option, a line each, with the question asked after compression and in view of it.

    Points whose policy refused, or that were not measured, are left out; the dashed line is the full cache.
    """
    figure = new_figure(10, 4.4)
    panels = figure.subplots(1, 2, sharey=True)
    found = {(row.policy, row.retained): row for row in rows if row.refused is None}
    lengths = {row.length for row in rows}
    prompts = f", prompts of {lengths.pop():,} tokens" if len(lengths) == 1 else ""
    for axes, mode, title in zip(
        panels, (AFTER, IN_VIEW), ("asked after compression", "question in view"), strict=True
    ):
        if (reference := found.get((REFERENCE, None))) is not None:
            axes.axhline(accuracy(reference, mode).mean, color="#555555", linestyle="--", linewidth=1, label="full")
        for number, (label, line) in enumerate(study.lines.items()):
            points = [(x, found[c.name, c.retained]) for x, c in line if (c.name, c.retained) in found]
            error_bars(axes, [x for x, _ in points], [accuracy(row, mode) for _, row in points], label, number)
        plain_axes(axes, study.xlabel, "accuracy")
        axes.set_ylim(-0.04, 1.04)
        axes.set_title(f"{title}{prompts}", fontsize=10)
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(study.title, fontsize=11)
    return figure
