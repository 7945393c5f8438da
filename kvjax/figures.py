"""Figures that are drawn without a display; matplotlib is imported when one is (extra ``eval``)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from kvjax.errors import KvjaxError, missing_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """Refuse in one sentence (KvjaxError) where matplotlib is missing: before anything is computed for a picture."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise KvjaxError(missing_extra("Pictures need the package matplotlib", "eval")) from error


def new_figure(width: float, height: float) -> Figure:
    """A figure that draws into memory; one sentence without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as a PNG file's bytes, without the name of the version that drew it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()
