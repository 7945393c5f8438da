"""``kvjax recommend``: measures policies on a user's own texts, and says which one to use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvjax.checks import MOST_SEED, number, whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError, quoted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.entries import Entry
    from kvjax.eval.recommend.choice import Goal
    from kvjax.eval.recommend.folder import Folder
    from kvjax.eval.recommend.measure import Measured, Request
    from kvjax.eval.recommend.passages import Passage

_say = functools.partial(first_steps.say, "recommend")

#: Tokens of a passage where nothing is said: enough to tell policies apart, and minutes on a CPU.
_TOKENS = 1024
#: Fractions that are measured where nothing is said.
_DEFAULT_FRACTIONS = (0.5, 0.25)
#: Fractions that are tried where a budget chooses among them.
_FRACTIONS = (0.9, 0.75, 0.625, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.09375, 0.0625)
#: Policies that are measured: those that need no question, two that show what costs nothing to choose, and the one that
#: kept most answers in our measurements, for which a model reads every prompt again.
_POLICIES = (
    "keydiff; compactor; chunkkv; expected_attention; tova; snapkv; lagkv; streamingllm; "
    "razor:inner=compactor,induction_share=0.03; adaptive:inner=kvzip,scope=model"
)


@app.command()
def recommend(
    text: Annotated[
        list[Path], typer.Option("--text", help="A text file, or a folder of them; may be given several times.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the answer; caches already measured there are kept.")
    ] = Path("recommendation"),
    context: Annotated[int, typer.Option("--context", help="Tokens of the prompts that the policy is for.")] = 4096,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Largest cache in bytes, such as 2GB; not with --loss.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option("--loss", help="Largest increase of the full cache's loss, such as 1%, the default.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Prompts at a time; bytes are of all their caches.")] = 1,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    policies: Annotated[str, typer.Option("--policies", help="As for `kvjax compare`.")] = _POLICIES,
    retained: Annotated[
        str | None,
        typer.Option(
            "--retained",
            help="Fractions to measure, by default 0.5,0.25; with --budget the largest that fits, of these and smaller "
            "ones, by default from 0.9.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--measured-tokens", help="Tokens of each passage; by default 1,024, or --context if less."),
    ] = None,
    passages: Annotated[int, typer.Option("--passages", help="Passages to take from the texts.")] = 6,
    needles: Annotated[int, typer.Option("--needles", help="Needles hidden in each passage.")] = 2,
    storage: flag.Storage = "model",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the passages and needles.")] = 0,
    markdown: flag.Markdown = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Say which policy to use for texts like these.

    Passages of the texts are compressed by every candidate; then numbers that were hidden in them are asked for, and
    the loss of the text that follows is measured. The answer is the flag to copy, with a table and a picture.
    """
    from kvjax.bench import machine
    from kvjax.cache.quantisation import parse_storage
    from kvjax.checkpoints.digest import weights_digest
    from kvjax.eval.entries import REFERENCE, entries
    from kvjax.eval.recommend import choice
    from kvjax.eval.recommend.folder import FILES, Folder, Settings, digest
    from kvjax.eval.recommend.measure import Request, facts
    from kvjax.eval.recommend.passages import make_passages, read_texts

    goal = _goal(budget, loss)
    measured = min(context, _TOKENS) if tokens is None else tokens
    counts = {"--context": context, "--batch": batch, "--passages": passages, "--needles": needles}
    for name, value in (counts | {"--measured-tokens": measured}).items():
        whole_number(name, value, 1, 2**31)
    whole_number("--seed", seed, 0, MOST_SEED)
    fractions = None if retained is None else inputs.numbers(retained, "--retained")
    chosen = entries(policies, fractions or _DEFAULT_FRACTIONS)
    kind = parse_storage(storage)
    first_steps.check_results(out)
    texts = read_texts(text, without=[out / name for name in FILES])
    lm = first_steps.load(model, dtype, compile_cache=compile_cache, weights=weights)
    for name, value in (("--context", context), ("--measured-tokens", measured)):
        if value > lm.config.max_position:
            raise UsageError(f"{name} is {value}, and this model's context is {lm.config.max_position}.")
    settings = Settings(
        lm.name, lm.params.number_format, storage, digest(texts), context, batch, measured, passages, needles, seed,
        weights_digest(lm.params),
    )  # fmt: skip
    folder = Folder(out, settings)
    earlier = folder.earlier()
    made = make_passages(lm, texts, tokens=measured, passages=passages, needles=needles, seed=seed)
    request = Request(context, batch, kind)
    chosen = _within(lm, chosen, request, goal.budget, fractions)
    rows, code = _measure(lm, made, chosen, request, folder, earlier)
    if not any(row.policy == REFERENCE and row.refused is None for row in rows):
        return code
    longest = max(len(passage.context) for passage in made)
    drawn = choice.figure(rows, goal, longest, context)
    recommended = _answer(facts(lm, made, request, machine.describe()), rows, goal, folder, drawn, markdown)
    return code or (0 if recommended else 1)


def _goal(budget: str | None, loss: str | None) -> Goal:
    """The criterion by which a cache is recommended."""
    from kvjax.eval.recommend.choice import Goal

    if budget is not None and loss is not None:
        raise UsageError("--budget and --loss ask for two things; give one of them.")
    return Goal(inputs.byte_count(budget, "--budget"), None if loss is None else _fraction(loss))


def _within(
    lm: LanguageModel,
    chosen: Sequence[Entry],
    request: Request,
    budget: int | None,
    fractions: Sequence[float] | None,
) -> Sequence[Entry]:
    """The entries, each at the largest fraction whose cache is within the budget, if there is one.

    ``fractions`` are those that were asked for; smaller ones are tried too.
    """
    from kvjax.eval.recommend.measure import within

    if budget is None:
        return chosen
    tried = _FRACTIONS if not fractions else [*fractions, *(one for one in _FRACTIONS if one < max(fractions))]
    return within(lm, chosen, request, budget, tried)


def _fraction(text: str) -> float:
    """``"1%"`` or ``"0.01"`` as 0.01."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        number("--loss", value, 0.0, 1.0)
    except (ValueError, UsageError) as error:
        raise UsageError(f"--loss is {quoted(text)}; give a fraction such as 1% or 0.01.") from error
    return value


def _measure(
    lm: LanguageModel,
    made: Sequence[Passage],
    chosen: Sequence[Entry],
    request: Request,
    folder: Folder,
    earlier: Sequence[Measured],
) -> tuple[list[Measured], int]:
    """Every cache's row, those of an earlier run first, and the exit status if no more follows."""
    from kvjax import progress
    from kvjax.eval.recommend.measure import expected_seconds, measure, name_of
    from kvjax.eval.suites.estimate import in_words

    measured = {row.policy for row in earlier}
    missing = [entry for entry in chosen if name_of(entry) not in measured]
    if earlier:
        _say(f"caches kept of an earlier run: {len(earlier)}")
    if missing:
        _say(f"caches to measure: {len(missing)}, about {in_words(expected_seconds(lm, made, missing))}")
    rows, code = list(earlier), 0

    def save(found: list[Measured]) -> None:
        rows[:] = found
        folder.save(found)

    try:
        with progress.stage("job", "kvjax recommend:", unit="caches", total=len(chosen), done=0) as shown:
            measure(lm, made, chosen, request, done=earlier, save=save, shown=shown)
    except KeyboardInterrupt:
        kept = f"what was measured so far is in {folder.path}" if rows else "nothing was measured yet"
        _say(f"{kept}; the same command goes on from there")
        code = INTERRUPTED
    return rows, code


def _answer(
    about: Sequence[str], rows: Sequence[Measured], goal: Goal, folder: Folder, drawn: Figure, markdown: bool
) -> bool:
    """Write the table and the picture, and print the answer; whether there is a policy to recommend."""
    from kvjax.eval.recommend import choice
    from kvjax.eval.recommend.folder import PICTURE, RESULTS, TABLE
    from kvjax.figures import png

    folder.write(PICTURE, png(drawn))
    found = choice.report(rows, goal, about, PICTURE)
    folder.write(RESULTS, found.json())
    folder.write(TABLE, found.markdown())
    found.print(markdown=markdown, width=200)
    if not markdown:
        print(f"Saved: {', '.join(str(folder.path / name) for name in (RESULTS, TABLE, PICTURE))}.")
    return choice.choose(rows, goal) is not None
