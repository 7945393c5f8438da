"""The commands that ask and compare: their flags. Nothing heavy is imported before the arguments are parsed."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import options as flag


def compare(
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; what it holds is not measured again.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Such as snapkv,lagkv:lag=64,sink=4,h2o; `all` names every policy.")
    ] = "all",
    retained: Annotated[
        str, typer.Option("--retained", help="Comma-separated shares of tokens to keep.")
    ] = "0.75,0.5,0.25,0.125",
    tasks: Annotated[
        str, typer.Option("--tasks", help="Comma-separated needle tasks.")
    ] = "niah_single_1,noise_multikey,noise_multivalue",
    lengths: Annotated[str, typer.Option("--lengths", help="Comma-separated tokens, question and answer too.")] = "700",
    samples: Annotated[int, typer.Option("--samples", help="Of each task; one batch.")] = 12,
    turns: Annotated[bool, typer.Option("--turns/--no-turns", help="Whether conversations are held too.")] = True,
    storage: flag.Storage = "model",
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 42,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Ask every policy's cache the same questions.

    Accuracy, agreement with the full cache, bytes and speed go to one table and one picture. Results are saved after
    every row; the same command goes on after Ctrl-C, and with more policies or shares adds what is missing.
    """
    from kvjax.cli import compare as command
    from kvjax.cli import inputs

    return command.run(
        model=model,
        dtype=dtype,
        policies=policies,
        retained=inputs.numbers(retained, "--retained"),
        tasks=inputs.names(tasks),
        lengths=inputs.integers(lengths, "--lengths") or (),
        samples=samples,
        turns=turns,
        storage=storage,
        seed=seed,
        out=out,
        markdown=markdown,
        compile_cache=compile_cache,
    )


def compare_rounds(
    dialogues: Annotated[
        Path,
        typer.Option("--dialogues", help="JSON (lines): messages, ShareGPT, LongChat topics or LongMemEval."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; what it holds is not asked again.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    policies: Annotated[
        str, typer.Option("--policies", help="Such as round,round:top=0.3; `all` names every strategy.")
    ] = "all",
    most: Annotated[int, typer.Option("--most", help="Dialogues to read, from the file's beginning.")] = 10,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Cut histories to this many; three quarters of the context else.")
    ] = None,
    max_new_tokens: flag.MaxNewTokens = 16,
    rounds: Annotated[
        str | None,
        typer.Option("--rounds", help="Comma-separated: ask after only so many rounds of each dialogue, each in turn."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="How often each answer is timed, after once untimed.")] = 3,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Also draw time and tokens by number of rounds, as a PNG.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")] = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Ask dialogues' questions under Round Attention.

    Which rounds each strategy brings, agreement with the full cache, device bytes and time a turn go to one table.
    Answers are saved after every dialogue; the same command goes on after Ctrl-C.
    """
    from kvjax.cli import compare_rounds as command
    from kvjax.cli import inputs

    return command.run(
        model=model,
        dtype=dtype,
        dialogues=dialogues,
        policies=policies,
        most=most,
        tokens=tokens,
        max_new_tokens=max_new_tokens,
        rounds=inputs.integers(rounds, "--rounds") or (),
        repeats=repeats,
        out=out,
        picture=picture,
        markdown=markdown,
        compile_cache=compile_cache,
    )


def picture(
    name: Annotated[
        str,
        typer.Argument(help="retained-positions, razor-heads, slimkv-scores, lagkv-variants or question-answer."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The PNG file; numbers go beside it, and are not measured again.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    length: Annotated[int, typer.Option("--length", help="Tokens of each prompt, question and answer too.")] = 700,
    samples: Annotated[int, typer.Option("--samples", help="Prompts of each task.")] = 12,
    ratio: Annotated[float, typer.Option("--ratio", help="For retained-positions: the share kept.")] = 0.25,
    text: Annotated[
        str | None,
        typer.Option("--text", help="For retained-positions: the prompt, or @FILE; Python's reference else."),
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
        int | None, typer.Option("--tokens", help="For question-answer: cut dialogues; what fits the context else.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 42,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Draw a picture of one of the papers on a model of yours.

    retained-positions: what H2O and AhaKV keep of one prompt. razor-heads: accuracy by share of protected heads, with
    and without echo heads and compensation token. slimkv-scores: S1, S2 and their product. lagkv-variants: LagKV,
    LocalKV and L2. question-answer: how attention to earlier rounds of a question and of its answer are alike.
    """
    from kvjax.cli import inputs
    from kvjax.cli import picture as command

    return command.run(
        name,
        model=model,
        dtype=dtype,
        out=out,
        length=length,
        samples=samples,
        ratio=ratio,
        text=inputs.text_or_file(text, "--text"),
        dialogues=dialogues,
        most=most,
        least_rounds=least_rounds,
        tokens=tokens,
        seed=seed,
        compile_cache=compile_cache,
    )
