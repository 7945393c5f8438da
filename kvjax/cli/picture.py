"""``kvjax picture``: pictures of the papers, made anew on any model."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.cli import inputs, session
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError, quoted
from kvjax.files import check_picture, is_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvjax.checkpoints.load import LanguageModel

_say = functools.partial(session.say, "picture")

POSITIONS, ALIKE, LONG = "retained-positions", "question-answer", "long-generation"
#: Policies whose kept positions are shown; the paper gives every method a recent window of 32 tokens.
KEEPING = ("h2o:recent=32", "ahakv:recent=32")
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
        Path, typer.Option("--out", help="The PNG file; numbers are saved beside it and not measured again.")
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
            "--policies", help="For long-generation: such as 'ahakv:recent=256;h2o'; by default five that evict."
        ),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", help="For long-generation: tokens that each head holds.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples.")] = 42,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Draw a picture of one of the papers, or of a long answer, on a model of yours.

    retained-positions: the tokens that H2O and AhaKV keep of one prompt. razor-heads: accuracy by fraction of protected
    heads, with and without echo heads and compensation token. slimkv-scores: S1, S2 and their product. lagkv-variants:
    LagKV, LocalKV and L2. question-answer: how alike a question and its answer attend to earlier rounds.
    long-generation: next-token loss along a long answer under policies that evict while they decode.
    """
    from kvjax.checks import number, whole_number
    from kvjax.eval import long_generation
    from kvjax.eval.results import Settings
    from kvjax.eval.studies import STUDIES
    from kvjax.figures import new_figure

    text = None if text is None else inputs.text(text, "--text")
    known = [POSITIONS, ALIKE, LONG, *STUDIES]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"There is no picture {quoted(name)};{hint} known are {', '.join(known)}.")
    _refuse_others(context, name)
    check_picture("--out", out)
    settings = Settings(model, "", TASKS, samples, False, "model", seed)
    keeping = [f"{policy},ratio={ratio}" for policy in KEEPING]
    if name == POSITIONS:
        _parse_all(keeping)
    if name == LONG:
        whole_number("slots", slots, 1)
        _parse_all(long_generation.policies(slots, policies))
    if name == ALIKE and (dialogues is None or not is_file(dialogues)):
        raise UsageError(f"{ALIKE} is drawn of real dialogues; give --dialogues a file of them (it is {dialogues}).")
    number("ratio", ratio, 0, 1, open_below=True)
    whole_number("length", length, 1)
    whole_number("most", most, 1)
    if tokens is not None:
        whole_number("tokens", tokens, 1)
    whole_number("least-rounds", least_rounds, 3)
    new_figure(1, 1)  # refuses without matplotlib now, and not when all is measured
    lm = session.load(model, dtype, compile_cache=compile_cache, weights=weights)
    if name == POSITIONS:
        _save(out, _positions(lm, keeping, text, length))
        return 0
    if name == ALIKE:
        assert dialogues is not None
        _save(out, _alike(lm, dialogues, most, least_rounds, tokens))
        return 0
    if name == LONG:
        ids = long_generation.answer_ids(lm, text, 2000 if tokens is None else tokens, seed)
        return _long_generation(lm, ids, slots, long_generation.policies(slots, policies), out)
    return _study(name, lm, settings, length, out)


def _refuse_others(context: typer.Context, name: str) -> None:
    """Refuse (UsageError) options that were typed and are of other pictures."""
    for option, pictures in _ONLY.items():
        source = context.get_parameter_source(option)
        if name not in pictures and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{option.replace('_', '-')} is for {' and '.join(pictures)}; leave it out for {name}.")


def _parse_all(policies: Sequence[str]) -> None:
    from kvjax.policies import parse

    for policy in policies:
        parse(policy)


def _study(name: str, lm: LanguageModel, settings, length: int, out: Path) -> int:
    """Measure what the numbers beside the picture do not hold yet, then draw."""
    import dataclasses

    from kvjax.bench import machine
    from kvjax.eval import results
    from kvjax.eval.compare import Comparison
    from kvjax.eval.comparison_report import report
    from kvjax.eval.studies import STUDIES, study_figure
    from kvjax.files import write_atomically

    settings = dataclasses.replace(settings, model=lm.name, dtype=lm.params.number_format)
    numbers, facts = out.with_suffix(".json"), machine.describe()

    def save(rows) -> None:
        write_atomically(numbers, report(settings, rows, facts).json())

    earlier = results.read_rows(numbers, settings)
    comparison = Comparison(lm, settings, rows=earlier, save=save, say=_say, speed=False)
    code = 0
    try:
        comparison.run(STUDIES[name].candidates, [length])
    except KeyboardInterrupt:
        _say(f"what was measured so far is in {numbers}; the same command goes on from there")
        code = INTERRUPTED
    # The file keeps the rows of other lengths too.
    _save(out, study_figure(STUDIES[name], [row for row in comparison.rows if row.length == length]))
    return code


def _long_generation(lm: LanguageModel, ids: Sequence[int], slots: int, policies: Sequence[str], out: Path) -> int:
    """Measure what the numbers beside the picture do not hold yet, draw, and print the means."""
    import hashlib
    import json

    from kvjax.eval import long_generation

    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    settings = long_generation.Settings(lm.name, lm.params.number_format, slots, digest)
    rows = long_generation.measure(lm, ids, settings, out.with_suffix(".json"), _say, policies)
    _save(out, long_generation.long_generation_figure(rows, settings))
    long_generation.report(rows).print()
    return 0


def _positions(lm: LanguageModel, policies: Sequence[str], text: str | None, length: int) -> Figure:
    from kvjax.eval.positions import documentation, positions_figure, retained_positions

    ids = lm.tokenizer.encode(documentation() if text is None else text)[:length]
    found = []
    for policy in policies:
        _say(f"{policy} reads {len(ids)} tokens")
        found.append(retained_positions(lm, ids, policy))
    return positions_figure(found)


def _alike(lm: LanguageModel, path: Path, most: int, least_rounds: int, tokens: int | None) -> Figure:
    """Draw what questions and answers of real dialogues attend to, and print the numbers of the picture's title."""
    from kvjax.eval.dialogues import long_dialogues
    from kvjax.eval.question_answer import alike_figure, last_round, means
    from kvjax.policies.profile import WatershedProfile, packaged

    chosen = long_dialogues(lm, path, most=most, least_rounds=least_rounds, tokens=tokens)
    found = []
    for done, dialogue in enumerate(chosen, 1):
        found.append(last_round(lm, dialogue))
        _say(f"dialogue {done} of {len(chosen)}: {dialogue.name}, {len(dialogue.rounds)} rounds")
    profile = packaged(WatershedProfile, lm.config)
    alike, _, as_lengths = means(found)
    print(
        f"Dialogues: {len(found)}. Question and answer correlate {alike.min():.2f} to {alike.max():.2f} by layer, mean "
        f"{alike.mean():.2f}; question and the rounds' lengths {as_lengths.mean():.2f}."
    )
    return alike_figure(found, None if profile is None else profile.watershed, lm.name)


def _save(out: Path, figure: Figure) -> None:
    from kvjax.figures import png
    from kvjax.files import write_atomically

    write_atomically(out, png(figure))
    print(f"Saved: {out}.")
