"""The picture of a watershed profile: how much each layer disagrees with all later ones about rounds."""

from __future__ import annotations

import io

from kvjax.calibrate.heatmap import require_matplotlib
from kvjax.policies.profile import WatershedProfile


def kl_curve(profile: WatershedProfile) -> bytes:
    """A PNG of the mean KL divergence by layer, with the watershed marked.

    Raises:
      UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    curve = profile.divergence[:-1]
    layers = range(1, len(curve) + 1)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(layers, curve, marker="o", markersize=4, color="tab:blue")
    mark = profile.watershed
    axes.axvline(mark, color="tab:red", linewidth=1.2, linestyle="--")
    axes.annotate(
        f"$L_w$ = {mark} of {profile.shape.num_layers}",
        (mark, max(curve)),
        xytext=(6, -4),
        textcoords="offset points",
        va="top",
        color="tab:red",
    )
    axes.set_xlabel("layer (counted from 1)")
    axes.set_ylabel("mean KL to later layers (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(
        f"{profile.model}\nthe last question token's attention over {profile.rounds:,} rounds, "
        f"{profile.dialogues} dialogues",
        fontsize=9,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
