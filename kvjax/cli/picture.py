"""``kvjax picture``: pictures of the papers, made anew on any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.checks import number, whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import app
from kvjax.cli.picture_kinds import (
    ALIKE,
    LONG,
    POSITIONS,
    LongGeneration,
    Picture,
    QuestionAnswer,
    RetainedPositions,
    StudyPicture,
)
from kvjax.errors import UsageError, did_you_mean, quoted
from kvjax.files import check_picture

TASKS = ("niah_single_1", "noise_multikey")
#: Pictures of what policies answer, by one option of one system: those of ``kvjax.eval.studies``.
MEASURED = ("razor-heads", "slimkv-scores", "lagkv-variants")
#: Options of some pictures alone.
_ONLY = {
    "ratio": (POSITIONS,),
    "length": (POSITIONS, *MEASURED),
    "samples": MEASURED,
    "seed": (LONG, *MEASURED),
    "text": (POSITIONS, LONG),
    "dialogues": (ALIKE,),
    "most": (ALIKE,),
    "least_rounds": (ALIKE,),
    "tokens": (ALIKE, LONG),
    "policies": (LONG,),
    "slots": (LONG,),
}


@app.command()
def picture(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            help="retained-positions, razor-heads, slimkv-scores, lagkv-variants, question-answer or long-generation."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="The PNG file; numbers are saved beside it, but those of retained-positions, and not measured again.",
        ),
    ],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of each prompt, with question and answer.")] = 700,
    samples: Annotated[int, typer.Option("--samples", help="Prompts of each task.")] = 12,
    ratio: Annotated[float, typer.Option("--ratio", help="For retained-positions: the fraction kept.")] = 0.25,
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            help="For retained-positions: the prompt, or @FILE; by default Python's reference. For long-generation: "
            "the answer; by default a made-up solution in numbered steps.",
        ),
    ] = None,
    dialogues: Annotated[
        Path | None, typer.Option("--dialogues", help="For question-answer: JSON (lines), as calibrate watershed.")
    ] = None,
    most: Annotated[
        int, typer.Option("--most", help="For question-answer: dialogues, from the file's beginning.")
    ] = 40,
    least_rounds: Annotated[
        int, typer.Option("--least-rounds", help="For question-answer: skip dialogues with fewer.")
    ] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            help="For question-answer: cut dialogues to this many; by default to the context. For long-generation: "
            "tokens of the answer; by default 2,000.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            "--policies", help="For long-generation: such as 'ahakv:recent=256;h2o'; by default those that evict."
        ),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", help="For long-generation: tokens that each head holds.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 42,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Draw a figure of the papers on any model.

    retained-positions: the tokens that H2O and AhaKV keep of one prompt. razor-heads: accuracy by fraction of protected
    heads, with and without echo heads and compensation token. slimkv-scores: S1, S2 and their product. lagkv-variants:
    LagKV, LocalKV and L2. question-answer: how alike a question and its answer attend to earlier rounds.
    long-generation: next-token loss along a long answer under policies that evict while they decode.
    """
    from kvjax.eval.results import Settings
    from kvjax.eval.studies import STUDIES
    from kvjax.figures import require_matplotlib

    text = None if text is None else inputs.text(text, "--text")
    _check_name(name, [POSITIONS, ALIKE, LONG, *STUDIES])
    _refuse_others(context, name)
    check_picture("--out", out)
    with inputs.naming_flags("samples", "seed"):
        settings = Settings(model, "", TASKS, samples, False, "model", seed)
    pictures: dict[str, Picture] = {
        POSITIONS: RetainedPositions(ratio, text, length),
        ALIKE: QuestionAnswer(dialogues, most, least_rounds, tokens),
        LONG: LongGeneration(slots, policies, text, tokens, seed),
    }
    chosen = pictures.get(name) or StudyPicture(name, settings, length)
    number("--ratio", ratio, 0, 1, open_below=True)
    whole_number("--length", length, 1)
    whole_number("--most", most, 1)
    if tokens is not None:
        whole_number("--tokens", tokens, 1)
    whole_number("--least-rounds", least_rounds, 3)
    chosen.check()
    require_matplotlib()
    return chosen.draw(first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights), out)


def _check_name(name: str, known: list[str]) -> None:
    """Refuse (UsageError) what is no picture, with the name that comes nearest."""
    if name not in known:
        near = did_you_mean(name, known)
        raise UsageError(f"There is no picture {quoted(name)};{near} known are {', '.join(known)}.")


def _refuse_others(context: typer.Context, name: str) -> None:
    """Refuse (UsageError) options that were typed and are of other pictures."""
    for option, pictures in _ONLY.items():
        source = context.get_parameter_source(option)
        if name not in pictures and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(pictures)}; leave it out for {name}.")
