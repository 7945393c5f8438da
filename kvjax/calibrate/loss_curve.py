"""The picture of a training: the loss of every step."""

from __future__ import annotations

import numpy as np

from kvjax.figures import new_figure, png


def loss_curve(losses: np.ndarray, title: str, unit: str, levels: dict[str, float] | None = None) -> bytes:
    """A PNG of the losses by step, each beside the mean of those around it; ``levels`` are drawn across by name.

    Raises:
      KvjaxError: matplotlib is not installed.
    """
    figure = new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8, label="each step")
    width = max(len(losses) // 40, 1)
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(steps[width - 1 :] - (width - 1) / 2, smooth, color="tab:blue", label=f"mean of {width}")
    for (name, value), color in zip((levels or {}).items(), ("tab:red", "tab:green"), strict=False):
        axes.axhline(value, color=color, linestyle="--", linewidth=1.1, label=name)
    if losses.min() > 0 and losses.max() > 20 * losses.min():
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9)
    return png(figure)
