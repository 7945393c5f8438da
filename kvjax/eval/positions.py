"""The positions of a prompt that a policy keeps: AhaKV's plot of retained indices, H2O against AhaKV."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from kvjax.cache.groups import parts
from kvjax.cache.pool import mark_by_head
from kvjax.checkpoints.load import LanguageModel
from kvjax.errors import UsageError
from kvjax.eval.pictures import plain_axes, style
from kvjax.figures import new_figure
from kvjax.generation import generate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Bins of positions in a picture.
BINS = 32


@dataclasses.dataclass(frozen=True)
class Retained:
    """The positions of a prompt that one policy kept.

    Attributes:
      name: the policy.
      fraction: [layer, position] fraction of the layer's KV heads that kept the position, 0 to 1.
    """

    name: str
    fraction: Float[np.ndarray, "L T"]

    @property
    def mean_position(self) -> float:
        """Mean of the positions kept over those there are: 0.5 for no preference of either end."""
        weight = self.fraction.sum(axis=0)
        places = (np.arange(weight.size) + 0.5) / weight.size
        return float((weight * places).sum() / weight.sum())

    def binned(self, bins: int) -> Float[np.ndarray, "L N"]:
        """Mean fraction of each of ``bins`` runs of positions."""
        return np.stack([run.mean(axis=1) for run in np.array_split(self.fraction, bins, axis=1)], axis=1)


def retained_positions(lm: LanguageModel, tokens: Sequence[int], policy: str) -> Retained:
    """Read a prompt with a policy that marks positions, and look at what its cache holds.

    Raises:
      UsageError: a policy whose pool does not say which position a slot holds.
    """
    cache: Any = generate(lm, list(tokens), policy=policy, max_new_tokens=0).cache
    layers = cache.by_layer()
    fraction = np.zeros((len(layers), len(tokens)))
    for number, layer in enumerate(layers):
        heads = 0
        for pool in parts(layer):
            if "position" not in pool.marks:
                raise UsageError(f"{policy} does not mark the positions of what it keeps; h2o, ahakv and tova do.")
            length = np.asarray(pool.length)[0]
            for head, positions in enumerate(np.asarray(mark_by_head(pool, "position"))[0]):
                fraction[number, positions[: length[head]]] += 1
            heads += len(length)
        fraction[number] /= heads
    return Retained(policy, fraction)


def positions_figure(found: Sequence[Retained]) -> Figure:
    """A map of layers and positions for each policy, and the mean over layers of all of them."""
    figure = new_figure(10, 2.3 + 2.1 * len(found))
    grid = figure.add_gridspec(len(found) + 1, 1, height_ratios=[*[1.0] * len(found), 1.2])
    tokens = found[0].fraction.shape[1]
    bins = min(BINS, tokens)
    brightest = max(float(one.binned(bins).max()) for one in found)
    image = None
    maps = []
    for number, one in enumerate(found):
        axes = figure.add_subplot(grid[number])
        image = axes.imshow(
            one.binned(bins),
            aspect="auto",
            cmap="viridis",
            vmin=0,
            vmax=brightest,
            extent=(0, tokens, len(one.fraction), 0),
        )
        axes.set_ylabel("layer")
        axes.set_title(f"{one.name}: mean position {one.mean_position:.0%} of the prompt", fontsize=10)
        maps.append(axes)
    if image is not None:
        figure.colorbar(image, ax=maps, label="fraction of heads that keep it")
    axes = figure.add_subplot(grid[len(found)])
    edges = np.linspace(0, tokens, bins + 1)
    for number, one in enumerate(found):
        color = style(number)["color"]
        axes.stairs(one.binned(bins).mean(axis=0), edges, baseline=None, label=one.name, color=color, linewidth=1.5)
    kept = [one.fraction.mean() for one in found]
    axes.axhline(float(np.mean(kept)), color="#555555", linestyle="--", linewidth=1, label="evenly spread")
    plain_axes(axes, "position in the prompt", "fraction kept")
    axes.set_xlim(0, tokens)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def documentation() -> str:
    """Prose that every Python brings: chapters of its language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in ("execmodel", "exceptions", "objects", "types"))
