"""``kvjax calibrate scorer`` and ``gates``: what policies learn of a model, trained from texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.checks import MOST_SEED, number, whole_number
from kvjax.cli import inputs
from kvjax.cli import options as flag
from kvjax.cli.calibrate import Out, Texts, check_out, group, read_texts
from kvjax.files import check_writable

if TYPE_CHECKING:
    import numpy as np

Steps = Annotated[int, typer.Option("--steps", help="Steps of training.")]
Seed = Annotated[int, flag.option("seed")]
Picture = Annotated[bool, typer.Option(help="Also draw the loss by step, beside the profile.")]
Training = Annotated[
    Path | None,
    typer.Option(
        "--training",
        help="Folder of the checkpoints from which an interrupted run resumes, kept afterwards; by default beside the "
        "profile, removed at the end.",
    ),
]


@group.command()
def scorer(
    out: Out,
    texts: Texts,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    mesh: flag.Mesh = None,
    most: Annotated[int, typer.Option("--most", help="Pieces of text to read.")] = 32,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a piece, or what fits the context twice.")] = 1024,
    sampled: Annotated[int, typer.Option("--sampled", help="Tokens of each piece to train on.")] = 256,
    steps: Steps = 400,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Initial learning rate of Adam.")] = 0.01,
    seed: Seed = 0,
    training: Training = None,
    picture: Picture = True,
) -> None:
    """Train a linear map of each head from hidden states to KVzip's scores, from texts (for learned).

    Reads every piece twice, as KVzip does. An interrupted run resumes where it stopped.
    """
    from kvjax.calibrate.kvzip_scorer import scorer as train
    from kvjax.calibrate.training import remove_training
    from kvjax.cli import first_steps
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    whole_number("--most", most, 2)
    whole_number("--tokens", tokens, 8)
    whole_number("--sampled", sampled, 1)
    whole_number("--steps", steps, 1)
    whole_number("--seed", seed, 0, MOST_SEED)
    number("--learning-rate", learning_rate, 0, open_below=True)
    read, folder = _checked(out, texts, training, picture)
    lm = first_steps.load(model, dtype, mesh, weights=weights)
    found = train(
        lm, read, tokens=tokens, most=most, sampled=sampled, steps=steps, learning_rate=learning_rate, seed=seed,
        folder=folder,
    )  # fmt: skip
    save_profile(found.profile, out)
    if picture:
        title = f"{found.profile.model}: scorer, {found.profile.tokens:,} tokens of {found.profile.texts} pieces"
        levels = {"held out, average": found.before, "held out, scorer": found.after}
        _draw(out, found.losses, title, "mean squared error of the log score", levels)
    if training is None:
        remove_training(folder)
    print(
        f"{out}: mean squared error {found.before:.3f} before, {found.after:.3f} after on held-out text; correlation "
        f"with KVzip's scores {found.profile.correlation:.2f}"
    )


@group.command()
def gates(
    out: Out,
    texts: Texts,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    mesh: flag.Mesh = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of each text.")] = 512,
    keys: Annotated[int, typer.Option("--keys", help="Pass keys in each text.")] = 2,
    words: Annotated[int, typer.Option("--words", help="Words of each pass key.")] = 8,
    steps: Steps = 80,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak learning rate of AdamW.")] = 0.05,
    penalty: Annotated[float, typer.Option("--penalty", help="Weight of the mean gate in the loss.")] = 0.05,
    sink: Annotated[int, typer.Option("--sink", help="First tokens that streaming attention sees.")] = 16,
    recent: Annotated[int, typer.Option("--recent", help="Recent tokens that streaming attention sees.")] = 64,
    seed: Seed = 0,
    training: Training = None,
    picture: Picture = True,
) -> None:
    """Train a gate for each head between full attention and sinks with recent tokens, on pass keys (for duo).

    Keys are hidden in the texts. Holds T x T numbers a head, so texts are short. An interrupted run resumes where it
    stopped.
    """
    from kvjax.calibrate.head_gates import check
    from kvjax.calibrate.head_gates import gates as train
    from kvjax.calibrate.training import remove_training
    from kvjax.cli import first_steps
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    numbers = {"tokens": tokens, "keys": keys, "words": words, "steps": steps, "learning_rate": learning_rate}
    numbers |= {"penalty": penalty, "sink": sink, "recent": recent, "seed": seed}
    with inputs.naming_flags(*numbers):
        check(**numbers)
    read, folder = _checked(out, texts, training, picture)
    lm = first_steps.load(model, dtype, mesh, weights=weights)
    found = train(lm, read, folder=folder, **numbers)
    save_profile(found.profile, out)
    every = [gate for row in found.profile.gates for gate in row]
    if picture:
        title = f"{found.profile.model}: gates of {len(every)} KV heads, texts of {found.profile.tokens:,} tokens"
        _draw(out, found.losses, title, "distance and penalty", {})
    if training is None:
        remove_training(folder)
    print(
        f"{out}: loss {found.losses[0]:.4f} at first, {found.losses[-1]:.4f} at last; gates above 0.5 in "
        f"{sum(gate > 0.5 for gate in every)} of {len(every)} KV heads"
    )


def _checked(out: Path, texts: list[Path], training: Path | None, picture: bool) -> tuple[list[str], Path]:
    """The texts, and the folder of the training, once all that the files say was checked."""
    from kvjax.calibrate.training import check_training
    from kvjax.figures import require_matplotlib

    if picture:
        require_matplotlib()
        check_writable("--out", out.with_suffix(".png"))
    read = read_texts(texts)
    folder = training or out.with_suffix(".training")
    check_training(folder)
    return read, folder


def _draw(out: Path, losses: np.ndarray, title: str, unit: str, levels: dict[str, float]) -> None:
    from kvjax.calibrate.loss_curve import loss_curve
    from kvjax.files import write_atomically

    write_atomically(out.with_suffix(".png"), loss_curve(losses, title, unit, levels))
