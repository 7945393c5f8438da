"""Pictures of a suite: scores against bytes, and heat maps of length and depth."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax.eval.entries import REFERENCE, entry_name
from kvjax.eval.pictures import error_bars, plain_axes
from kvjax.eval.results import Estimate
from kvjax.eval.suites.scores import Line, prompt_tokens
from kvjax.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Letters of a legend's line, and of a line above a panel.
_LEGEND, _TITLE = 100, 44


def scores_figure(lines: Sequence[Line]) -> Figure:
    """Scores against live bytes, a line a policy, with standard errors; the dashed line is the full cache."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    answered = [line for line in lines if line.scored]
    for line in answered:
        if line.policy == REFERENCE:
            axes.axhline(100 * line.score.mean, color="#555555", linestyle="--", linewidth=1, label=REFERENCE)
    names = [name for name in dict.fromkeys(line.policy for line in answered) if name != REFERENCE]
    for number, name in enumerate(names):
        mine = sorted((line for line in answered if line.policy == name), key=lambda line: line.live_fraction or 0)
        found = [Estimate(100 * line.score.mean, 100 * line.score.error) for line in mine]
        error_bars(axes, [100 * (line.live_fraction or 0) for line in mine], found, name, number)
    plain_axes(axes, "live cache, % of full", "score, %")
    _say_length(axes, answered)
    axes.set_ylim(-4, 104)
    axes.set_xlim(0, 105)
    if answered:
        axes.legend(frameon=False, fontsize=8)
    return figure


def task_figure(lines: Sequence[Line]) -> Figure:
    """Every task's score, a bar of each cache."""
    answered = [line for line in lines if line.scored]
    tasks = list(dict.fromkeys(one.item.task for line in answered for one in line.scored))
    longest = max((len(_name(line)) for line in answered), default=1) + 8
    across = max(1, min(3, _LEGEND // longest))
    height_of_names = 0.18 * -(-len(answered) // across)
    figure = new_figure(7, 1.0 + height_of_names + 0.16 * len(tasks) * (len(answered) + 1))
    axes = figure.subplots()
    height = 1 / (len(answered) + 1)
    for number, line in enumerate(answered):
        values = [_mean([one.score for one in line.scored if one.item.task == task]) for task in tasks]
        places = [place + number * height for place in range(len(tasks))]
        color = "#bbbbbb" if line.policy == REFERENCE else _color(number)
        axes.barh(places, [100 * value for value in values], height=height * 0.9, label=_name(line), color=color)
    axes.set_yticks([place + 0.5 - height for place in range(len(tasks))], tasks)
    plain_axes(axes, "score, %", "")
    _say_length(axes, answered)
    axes.set_ylim(len(tasks) - height / 2, -height)
    axes.set_xlim(0, 104)
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=across)
    return figure


def _say_length(axes: Axes, lines: Sequence[Line]) -> None:
    if tokens := prompt_tokens(lines):
        axes.set_title(f"prompts of {tokens}", fontsize=10)


def _name(line: Line) -> str:
    return entry_name(line.policy, line.retained)


def _color(number: int) -> str:
    from kvjax.eval.pictures import style

    return style(number - 1)["color"]


def heat_map(lines: Sequence[Line], length: str) -> Figure:
    """Mean scores by length and depth, a panel a cache; ``length`` says what lengths are of."""
    answered = [line for line in lines if line.scored]
    cells = [one.item.cell for line in answered for one in line.scored if one.item.cell is not None]
    widths, depths = sorted({cell[0] for cell in cells}), sorted({cell[1] for cell in cells})
    across = min(2, max(len(answered), 1))
    down = max(-(-len(answered) // across), 1)
    figure = new_figure(4.2 * across + 0.8, 3.2 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    image = None
    for axes, line in zip(panels, answered, strict=False):
        grid = np.full((len(depths), len(widths)), np.nan)
        for column, width in enumerate(widths):
            for row, depth in enumerate(depths):
                values = [one.score for one in line.scored if one.item.cell == (width, depth)]
                grid[row, column] = 100 * _mean(values)
        image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=100, interpolation="nearest")
        _write_values(axes, grid)
        axes.set_xticks(range(len(widths)), [f"{width:,.0f}" for width in widths], rotation=45, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        axes.set_xlabel(length, fontsize=8)
        axes.set_ylabel("depth, %", fontsize=8)
        title = f"{_name(line)}: {100 * line.score.mean:.1f}"
        axes.set_title("\n".join(textwrap.wrap(title, _TITLE)), fontsize=9)
    for axes in panels[len(answered) :]:
        axes.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=list(panels[: len(answered)]), label="score, %")
    return figure


def _write_values(axes: Axes, grid: np.ndarray) -> None:
    """Each cell's score in it, dark on light."""
    for (row, column), value in np.ndenumerate(grid):
        if not math.isnan(value):
            color = "black" if value > 60 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
