"""A picture of what an engine's slots did: prefill, decoding, idle."""

from __future__ import annotations

from pathlib import Path

from kvjax.engine.engine_report import EngineReport
from kvjax.errors import UsageError
from kvjax.figures import new_figure, png
from kvjax.files import write_atomically

#: Colours of prefill and of decoding; idle time is white.
_PREFILL, _DECODING = "#ee7733", "#4477aa"
#: Slots that a picture shows.
_MOST_SLOTS = 32


def draw(found: EngineReport, path: Path) -> None:
    """Write the timeline of an engine's slots as a PNG file.

    Raises:
      UsageError: no request has had a slot.
      KvjaxError: matplotlib is not installed.
    """
    served = [one for one in found.served if one.slot is not None and one.started is not None]
    if not served:
        raise UsageError("No request has had a slot yet, so there is no timeline.")
    shown = min(found.slots, _MOST_SLOTS)
    figure = new_figure(11, 1.6 + 0.22 * shown)
    axes = figure.add_subplot()
    end = found.began + found.seconds
    for name, color, start, stop in (
        ("prefill", _PREFILL, "started", "first_token"),
        ("decoding", _DECODING, "first_token", "finished"),
    ):
        label: str | None = name
        for slot in range(shown):
            spans = []
            for one in served:
                if one.slot == slot and getattr(one, start) is not None:
                    first, last = getattr(one, start), getattr(one, stop)
                    spans.append((first - found.began, (end if last is None else last) - first))
            axes.broken_barh(spans, (slot + 0.55, 0.9), color=color, label=label, edgecolor="white", linewidth=0.3)
            label = None
    more = f", the first {shown} of {found.slots}" if shown < found.slots else ""
    axes.set(xlabel="seconds", ylabel="slot", xlim=(0, found.seconds), ylim=(0.4, shown + 0.6))
    axes.set_title(f"{found.requests:,} requests through {found.slots} slots{more}: {found.decoding:.0%} decoding")
    axes.locator_params(axis="y", integer=True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    write_atomically(path, png(figure))
