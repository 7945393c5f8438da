"""The picture of a profile of retrieval heads: layers by heads, with the heads a policy would protect."""

from __future__ import annotations

import importlib.util
import io
from typing import Literal

from kvjax.errors import UsageError, missing_extra
from kvjax.policies.head_choice import protected_heads
from kvjax.policies.profile import HeadProfile


def require_matplotlib() -> None:
    """Say in one sentence that there can be no picture (UsageError), before anything is computed for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(missing_extra("The picture needs the package matplotlib", "eval"))


def heatmap(
    profile: HeadProfile,
    *,
    induction_share: float = 0.14,
    echo_share: float = 0.01,
    share_of: Literal["query", "kv"] = "query",
) -> bytes:
    """A PNG of both scores of every query head; the query heads of protected KV heads are framed.

    Raises:
      UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    shape = profile.shape
    group = shape.num_heads // shape.num_kv_heads
    protected = protected_heads(profile, induction_share, echo_share, share_of)
    wide, tall = 1.5 + 0.16 * shape.num_heads, 1.8 + 0.16 * shape.num_layers
    figure = Figure(figsize=(2 * max(wide, 2.6) + 1.0, tall), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("induction", "echo"), strict=True):
        table = getattr(profile, name)
        # Few heads score high; the root of a root shows the order of the others too.
        scale = PowerNorm(0.25, vmin=0, vmax=max(max(map(max, table)), 1e-6))
        image = axes.imshow(table, cmap="viridis", norm=scale, aspect="auto", interpolation="nearest")
        for layer, heads in enumerate(protected):
            for head in heads:
                place = (head * group - 0.5, layer - 0.5)
                axes.add_patch(Rectangle(place, group, 1, fill=False, edgecolor="tab:red", linewidth=1.2))
        axes.set_title(f"{name} score")
        axes.set_xlabel("query head")
        axes.set_xticks(range(0, shape.num_heads, max(1, shape.num_heads // 9)))
        figure.colorbar(image, ax=axes, location="right", shrink=0.8)
    figure.axes[0].set_ylabel("layer")
    count = sum(len(heads) for heads in protected)
    figure.suptitle(
        f"{profile.model}: {profile.tokens:,} random tokens x {profile.repeats}\n"
        f"framed: {count} of {shape.num_layers * shape.num_kv_heads} KV heads protected "
        f"({induction_share:.0%} induction, {echo_share:.0%} echo)",
        fontsize=9,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
