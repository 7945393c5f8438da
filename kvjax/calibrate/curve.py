"""The picture of a watershed profile: how much each layer disagrees with all later ones about rounds."""

from __future__ import annotations

from kvjax.figures import new_figure, png
from kvjax.policies.profile import WatershedProfile


def kl_curve(profile: WatershedProfile) -> bytes:
    """A PNG of the mean KL divergence by layer, with the watershed marked.

    Raises:
      KvjaxError: matplotlib is not installed.
    """
    curve = profile.divergence[:-1]
    layers = range(1, len(curve) + 1)
    figure = new_figure(6.4, 3.6)
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
    return png(figure, dpi=110)
