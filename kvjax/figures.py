"""Figures that are drawn without a display; matplotlib is imported when one is (extra ``eval``)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from kvjax.errors import KvjaxError, missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure that draws into memory; one sentence without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvjaxError(missing_extra("Pictures need the package matplotlib", "eval")) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
