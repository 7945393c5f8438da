"""The picture of a profile of retrieval heads: layers by heads, with the heads a policy would protect."""

from __future__ import annotations

from kvjax.figures import new_figure, png
from kvjax.policies.head_choice import protected_heads
from kvjax.policies.profile import HeadProfile, Heads
from kvjax.policies.razor import RazorAttention


def protected_by_default(profile: HeadProfile) -> Heads:
    """The KV heads that ``RazorAttention`` protects, by layer, where its options are not given."""
    return protected_heads(profile, RazorAttention.induction_share, RazorAttention.echo_share, RazorAttention.share_of)


def heatmap(profile: HeadProfile) -> bytes:
    """A PNG of both scores of every query head; the query heads of KV heads protected by default are framed.

    Raises:
      KvjaxError: matplotlib is not installed.
    """
    shape = profile.shape
    wide, tall = 1.5 + 0.16 * shape.num_heads, 1.8 + 0.16 * shape.num_layers
    figure = new_figure(2 * max(wide, 2.6) + 1.0, tall)
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    group = shape.num_heads // shape.num_kv_heads
    protected = protected_by_default(profile)
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
        f"({RazorAttention.induction_share:.0%} induction, {RazorAttention.echo_share:.0%} echo)",
        fontsize=9,
    )
    return png(figure, dpi=110)
