"""Round Attention's first observation: rounds that a question attends to are those that its answer attends to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from kvjax.calibrate.round_attention_mass import question_and_answer_mass
from kvjax.checkpoints.load import LanguageModel
from kvjax.eval.dialogues import Dialogue
from kvjax.eval.pictures import plain_axes, style
from kvjax.figures import new_figure
from kvjax.tables import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class LastRound:
    """The attention of one dialogue's last round to the R rounds before it; each layer's sums to 1.

    Attributes:
      name: the dialogue.
      question, answer: [layer, round] P_q and P_a (section 3.1).
      lengths: [round] the part of the earlier tokens in each round, which uniform attention would give it.
    """

    name: str
    question: Float[np.ndarray, "L R"]
    answer: Float[np.ndarray, "L R"]
    lengths: Float[np.ndarray, " R"]

    @property
    def alike(self) -> Float[np.ndarray, " L"]:
        """Pearson correlation of P_q and P_a over rounds, by layer."""
        return np.array([_correlation(q, a) for q, a in zip(self.question, self.answer, strict=True)])

    @property
    def as_lengths(self) -> Float[np.ndarray, " L"]:
        """The same of P_q and the rounds' lengths: how much of a likeness is only that long rounds get more."""
        return np.array([_correlation(q, self.lengths) for q in self.question])


def _correlation(one: Float[np.ndarray, " R"], other: Float[np.ndarray, " R"]) -> float:
    """Pearson's; 0 where one of them is the same everywhere."""
    one, other = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / scale if scale > 0 else 0.0


def last_round(lm: LanguageModel, dialogue: Dialogue) -> LastRound:
    """The attention of a dialogue's last round, whose answer is the dialogue's own; at least two rounds come before it.

    Raises:
      UsageError: fewer rounds, or a dialogue longer than the model's context.
    """
    earlier = dataclasses.replace(dialogue, rounds=dialogue.rounds[:-1])
    return LastRound(dialogue.name, *question_and_answer_mass(lm, earlier.messages(), *dialogue.rounds[-1]))


def means(
    found: Sequence[LastRound],
) -> tuple[Float[np.ndarray, " L"], Float[np.ndarray, " L"], Float[np.ndarray, " L"]]:
    """By layer, over dialogues: mean correlation of question and answer, its standard error, and that with lengths."""
    alike = np.stack([one.alike for one in found])
    error = alike.std(axis=0, ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.zeros(alike.shape[1])
    return alike.mean(axis=0), error, np.mean([one.as_lengths for one in found], axis=0)


def alike_figure(found: Sequence[LastRound], watershed: int | None, model: str) -> Figure:
    """The paper's figure 2(a): P_q and P_a of the longest dialogue at four layers, then their likeness at every layer.

    Args:
      watershed: the model's, to be marked; None where it is not known.
    """
    longest = max(found, key=lambda one: len(one.lengths))
    layers, rounds = longest.question.shape
    shown = sorted({0, (watershed or layers // 2) - 1, (2 * layers) // 3, layers - 1})
    figure = new_figure(10, 6.2)
    grid = figure.add_gridspec(2, len(shown), height_ratios=[1, 1.1])
    first = None
    for place, layer in enumerate(shown):
        axes = figure.add_subplot(grid[0, place], sharey=first)
        first = first or axes
        for number, (label, masses) in enumerate((("question", longest.question), ("answer", longest.answer))):
            axes.plot(range(1, rounds + 1), masses[layer], label=label, linewidth=1.1, color=style(number)["color"])
        plain_axes(axes, "earlier round", "fraction of attention" if place == 0 else "")
        axes.set_title(f"layer {layer + 1}: correlation {longest.alike[layer]:.2f}", fontsize=9)
    assert first is not None
    first.set_ylim(bottom=0)
    first.legend(frameon=False, fontsize=8)
    axes = figure.add_subplot(grid[1, :])
    alike, error, as_lengths = means(found)
    numbers = range(1, layers + 1)
    axes.errorbar(
        numbers, alike, yerr=error, label="question and answer", linewidth=1.3, elinewidth=0.6, capsize=1.5, **style(0)
    )
    axes.plot(
        numbers, as_lengths, label="question and the rounds' lengths", linewidth=1.1, linestyle="--", color="#555555"
    )
    if watershed is not None:
        axes.axvline(watershed, color=style(1)["color"], linewidth=1, linestyle="--", label=f"$L_w$ = {watershed}")
    plain_axes(axes, "layer (counted from 1)", "correlation over rounds")
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(min(0.0, float(min(alike.min(), as_lengths.min())) - 0.05), 1.04)
    axes.set_title(f"mean of {counted(len(found), 'dialogue')}, with standard errors", fontsize=9)
    figure.suptitle(f"Round Attention: what the last of {rounds + 1} rounds attends to ({model})", fontsize=11)
    return figure
