"""Pictures, drawn without a display; matplotlib is imported when one is drawn (extra ``eval``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.eval.entries import REFERENCE
from kvjax.eval.results import AFTER, IN_VIEW, Estimate, Row, accuracy
from kvjax.figures import new_figure
from kvjax.tables import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors told apart by most eyes, after Paul Tol's schemes. Lines beyond these have them again, and are dashed.
_COLORS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988", "#882255", "#999933"),
    *("#332288", "#000000", "#ddaa99", "#77aadd"),
)
_MARKERS = "osD^vP<X>*hdp8"
_GREY, _LIGHT_GREY = "#555555", "#bbbbbb"
#: Lines that a reader can tell apart in one panel.
_NAMED = 8


def style(number: int) -> dict[str, Any]:
    """Color, marker and stroke of the ``number``-th line."""
    around, place = divmod(number, len(_COLORS))
    return {"color": _COLORS[place], "marker": _MARKERS[place], "linestyle": "--" if around % 2 else "-"}


def error_bars(axes: Axes, x: Sequence[float], found: Sequence[Estimate], label: str, number: int) -> None:
    """One line with standard errors, in the style of its number."""
    axes.errorbar(
        x,
        [one.mean for one in found],
        yerr=[0.0 if math.isnan(one.error) else one.error for one in found],
        label=label,
        linewidth=1.3,
        markersize=4.5,
        elinewidth=0.6,
        capsize=1.5,
        **style(number),
    )


def plain_axes(axes: Axes, xlabel: str, ylabel: str) -> None:
    """A light frame and grid, and names of the axes."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Accuracy against live bytes, a line a policy: asked after on the left, in view on the right, a row a length.

    A policy that sets its own size, and one that was measured at one fraction only, is a point. Error bars are standard
    errors; the dashed line is the full cache. Of more policies than eight those that lose least are named, best first,
    and the others are grey.
    """
    answered = [row for row in rows if row.refused is None]
    lengths = sorted({row.length for row in answered})
    names = _named([row for row in answered if row.policy != REFERENCE])
    figure = new_figure(11, 1 + 3.9 * max(1, len(lengths)))
    panels = figure.subplots(max(1, len(lengths)), 2, squeeze=False, sharey=True)
    for length, (left, right) in zip(lengths, panels, strict=False):
        for axes, mode, title in ((left, AFTER, "asked after compression"), (right, IN_VIEW, "question in view")):
            at_length = [row for row in answered if row.length == length]
            _accuracy_panel(axes, at_length, names, mode)
            axes.set_title(f"{title}, prompts of {length:,} tokens", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        order = [REFERENCE, *names]  # and what has no name is last
        both = sorted(
            zip(labels, handles, strict=True), key=lambda x: order.index(x[0]) if x[0] in order else len(order)
        )
        labels, handles = zip(*both, strict=True)
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _named(rows: Sequence[Row]) -> list[str]:
    """The policies, in their order; of too many those with the most answers over all sizes, best first."""
    names = list(dict.fromkeys(row.policy for row in rows))
    if len(names) <= _NAMED:
        return names
    found = dict.fromkeys(names, 0.0)
    for row in rows:
        means = (accuracy(row, mode).mean for mode in (AFTER, IN_VIEW))
        found[row.policy] += sum(mean for mean in means if not math.isnan(mean))
    return sorted(names, key=lambda name: -found[name])[:_NAMED]


def _accuracy_panel(axes: Axes, rows: Sequence[Row], names: Sequence[str], mode: str) -> None:
    lines: dict[str, list[tuple[float, Estimate]]] = {}
    for row in sorted(rows, key=lambda row: row.live_fraction):
        if row.policy == REFERENCE:
            axes.axhline(accuracy(row, mode).mean, color=_GREY, linestyle="--", linewidth=1, label=REFERENCE)
        else:
            lines.setdefault(row.policy, []).append((100 * row.live_fraction, accuracy(row, mode)))
    for number, name in enumerate(names):
        points = lines.pop(name, [])
        error_bars(axes, [x for x, _ in points], [found for _, found in points], name, number)
    grey = {"color": _LIGHT_GREY, "linewidth": 0.9, "marker": "o", "markersize": 3, "zorder": 1}
    for number, points in enumerate(lines.values()):
        label = counted(len(lines), "other policy", "other policies") if number == 0 else None
        axes.plot([x for x, _ in points], [found.mean for _, found in points], label=label, **grey)
    plain_axes(axes, "live cache, % of full", "accuracy")
    axes.set_ylim(-0.04, 1.04)
    axes.set_xscale("log", base=2)
    least = min([row.live_fraction for row in rows], default=0.125)
    ticks = [tick for tick in (1.5625, 3.125, 6.25, 12.5, 25, 50, 100) if tick >= 80 * least]
    axes.set_xlim(80 * least, 110)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
