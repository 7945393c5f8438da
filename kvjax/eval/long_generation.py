"""Next-token loss of a long answer while a policy evicts: what is left of reasoning in a few hundred slots."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.checkpoints.load import LanguageModel
from kvjax.documents import NotADocument, parse_json, validated
from kvjax.errors import KvjaxError, UsageError, quoted
from kvjax.eval.entries import REFERENCE, split_policies
from kvjax.eval.pictures import plain_axes, style
from kvjax.figures import new_figure
from kvjax.files import write_atomically
from kvjax.policies import LagKV
from kvjax.scoring import score
from kvjax.tables import Column, Report, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Policies that drop tokens while decoding, so that they hold about as many slots after any number of steps.
EVICTING = ("streamingllm", "compensated", "lagkv", "h2o", "tova", "ahakv")
#: Tokens over which a curve's points are means.
WINDOW = 125
_NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hana Ivo Jane Kai Lena Max Nora Otto Pia Quinn Rosa Sam Tess".split()
PROBLEM = (
    "Twenty children have marbles and give them to each other. Work out step by step how many each of them has. "
    "In each step write down what both had before, and what both have then."
)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The negative log-probability that one cache gives to each token of the answer."""

    policy: str
    losses: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The model, its number format, slots a head, and a digest of the answer's ids: what a picture's losses share.

    Attributes:
      parameters: a digest of the weights; empty in files of earlier versions.
    """

    model: str
    dtype: str
    slots: int
    digest: str
    parameters: str = ""


@dataclasses.dataclass(frozen=True)
class Saved:
    """The file of numbers beside a picture."""

    settings: Settings
    rows: tuple[Losses, ...]

    def __post_init__(self) -> None:
        if self.rows and self.rows[0].policy != REFERENCE:
            raise ValueError("the first row is not the full cache's")
        if len({len(row.losses) for row in self.rows}) > 1:
            raise ValueError("its rows have losses of different numbers of tokens")


def worked_solution(steps: int, seed: int = 0) -> str:
    """A made-up answer to PROBLEM in numbered steps; a step's numbers were last written some twenty steps before."""
    draw = random.Random(seed)
    held = {name: draw.randint(20, 60) for name in _NAMES}
    lines = ["At first " + ", ".join(f"{name} has {count}" for name, count in held.items()) + " marbles."]
    waiting = draw.sample(_NAMES, len(_NAMES))
    for step in range(1, steps + 1):
        giver, taker = waiting.pop(0), waiting.pop(0)
        before = held[giver], held[taker]
        count = draw.randint(1, max(1, min(9, before[0] - 1)))
        held[giver], held[taker] = before[0] - count, before[1] + count
        lines.append(
            f"Step {step}. {giver} had {before[0]} and {taker} had {before[1]}. {giver} gives {count} to {taker}, so "
            f"{giver} has {before[0]} - {count} = {held[giver]} and {taker} has {before[1]} + {count} = {held[taker]}."
        )
        for name in (giver, taker):  # back at any place of the later half
            waiting.insert(draw.randint(len(waiting) // 2, len(waiting)), name)
    return "\n".join(lines)


def policies(slots: int, text: str | None = None) -> list[str]:
    """The policies of the picture, each at so many slots a head, or those of ``--policies``."""
    # LagKV's window of up to two partitions takes a half of the slots at most.
    lag = max(2, slots // 4)
    small = {"lagkv": f"lagkv:lag={lag}"} if lag < LagKV.lag else {}
    names = [small.get(name, name) for name in EVICTING] if text is None else split_policies(text)
    return [f"{name}{',' if ':' in name else ':'}budget={slots}" for name in names]


def answer_ids(lm: LanguageModel, text: str | None, tokens: int, seed: int) -> list[int]:
    """The first ``tokens`` ids of a text, or of a worked solution.

    Raises:
      UsageError: more tokens than the text or the model's context has.
    """
    if tokens > lm.config.max_position:
        raise UsageError(f"{tokens:,} tokens are asked for; the model's context is {lm.config.max_position:,}.")
    ids = lm.tokenizer.encode(worked_solution(tokens // 20 + 1, seed) if text is None else text)
    if len(ids) < tokens:
        raise UsageError(f"The text has {len(ids)} tokens and {tokens} are asked for; give a longer one or --tokens.")
    return ids[:tokens]


def measure(
    lm: LanguageModel,
    ids: Sequence[int],
    settings: Settings,
    numbers: Path,
    say: Callable[[str], None],
    asked: Sequence[str],
) -> list[Losses]:
    """The full cache's losses and those of each policy, the answer fed token by token.

    Each is saved to ``numbers`` when it is there, and what that file has is not measured again.

    Raises:
      UsageError: the file holds losses of something else.
    """
    rows = _saved(numbers, settings)
    for policy in [REFERENCE, *asked]:
        if any(row.policy == policy for row in rows):
            continue
        say(f"{policy} is fed {len(ids)} tokens one at a time")
        found = score(lm, PROBLEM, list(ids), way="decode", policy=policy)
        rows.append(Losses(policy, tuple(-value for value in found.logprobs)))
        write_atomically(numbers, Report((), dataclasses.asdict(Saved(settings, tuple(rows)))).json())
    return rows


def _saved(path: Path, settings: Settings) -> list[Losses]:
    if not path.exists():
        return []
    try:
        saved: Saved = validated(Saved, parse_json(path.read_bytes()))
    except OSError as error:
        raise KvjaxError(f"{path} cannot be read: {error.strerror}.") from error
    except NotADocument as error:
        raise UsageError(f"{path} holds no losses of a long answer; choose another --out ({error}).") from error
    old, new = dataclasses.asdict(saved.settings), dataclasses.asdict(settings)
    old["parameters"] = old["parameters"] or settings.parameters
    for name in new:
        if old[name] != new[name]:
            with_other = f"with {name} {quoted(old[name])}, and {quoted(new[name])} is asked for"
            what = {"digest": "of another text", "parameters": "of other weights"}.get(name, with_other)
            raise UsageError(f"{path} holds losses {what}; choose another --out.")
    return list(saved.rows)


def report(rows: Sequence[Losses]) -> Report:
    """Mean loss of each cache, and what the full one's is less, of the whole answer and of its last quarter."""
    full = np.asarray(rows[0].losses)
    late = len(full) * 3 // 4
    columns = (
        Column("cache", "policy"),
        Column("loss", lambda row: np.mean(row.losses), "{:.3f}".format, right=True),
        Column("more than full", lambda row: np.mean(row.losses - full), "{:+.3f}".format, right=True),
        Column("in the last quarter", lambda row: np.mean((row.losses - full)[late:]), "{:+.3f}".format, right=True),
    )
    return Report([Table(columns, rows, labels=1)])


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of about WINDOW of the values [T]: their middles, and their means."""
    runs = np.array_split(values, max(1, round(values.size / WINDOW)))
    ends = np.cumsum([run.size for run in runs])
    return ends - np.array([run.size for run in runs]) / 2, np.array([run.mean() for run in runs])


def long_generation_figure(rows: Sequence[Losses], settings: Settings) -> Figure:
    """The full cache's loss along the answer above, and below what each policy's is more."""
    figure = new_figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    full = np.asarray(rows[0].losses)
    above.plot(*_means(full), color="#555555", linewidth=1.5)
    above.set_title(f"{settings.model}: loss of the full cache, nats a token", fontsize=10)
    plain_axes(above, "", "loss")
    for number, row in enumerate(rows[1:]):
        below.plot(
            *_means(np.asarray(row.losses) - full), label=row.policy, linewidth=1.5, markersize=4, **style(number)
        )
    below.axhline(0, color="#555555", linestyle="--", linewidth=1)
    below.axvline(settings.slots, color="#999999", linewidth=0.8)
    below.set_title(f"more than the full cache's, {settings.slots} slots a head (the upright line)", fontsize=10)
    plain_axes(below, "tokens of the answer", "loss, more than full")
    below.legend(frameon=False, fontsize=8)
    return figure
