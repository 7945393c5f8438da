"""``kvjax calibrate``: finds out once what a policy must know of a model's heads, and writes it to a small file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from kvjax.checks import whole_number
from kvjax.cli import inputs
from kvjax.cli import options as flag
from kvjax.cli.app import app
from kvjax.errors import UsageError
from kvjax.files import check_file, check_picture, check_writable, reason
from kvjax.progress import Stage, stage

group = typer.Typer(
    help="Make the profiles that some policies need, once per model.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(group, name="calibrate")

Out = Annotated[Path, typer.Option("--out", help="The profile to write, such as configs/profiles/MODEL.yaml.")]
Texts = Annotated[
    list[Path], typer.Option("--texts", help="A UTF-8 text file, such as a book; may be given several times.")
]


@group.command()
def retrieval_heads(
    out: Out,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Random tokens K; by default 2,500 or what fits the context.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="How often the random tokens are repeated.")] = 4,
    seed: Annotated[int, flag.option("seed")] = 0,
    picture: Annotated[bool, typer.Option(help="Also draw a heat map of layers by heads, beside the profile.")] = True,
) -> None:
    """Score every head by what it attends to in repeated random tokens (rotary models; for razor).

    Needs no data and, beside the weights, the memory of one layer.
    """
    from kvjax.calibrate.heatmap import heatmap, protected_by_default
    from kvjax.calibrate.retrieval import retrieval_heads as score
    from kvjax.cli import first_steps
    from kvjax.figures import require_matplotlib
    from kvjax.files import write_atomically
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    if picture:
        require_matplotlib()
    lm = first_steps.load(model, dtype, weights=weights)
    with counting("layers") as shown, inputs.naming_flags("tokens", "repeats", "seed"):
        profile = score(lm, tokens=tokens, repeats=repeats, seed=seed, progress=shown.update)
    save_profile(profile, out)
    if picture:
        write_atomically(out.with_suffix(".png"), heatmap(profile))
    count = sum(len(heads) for heads in protected_by_default(profile))
    print(f"{out}: {count} of {lm.config.num_layers * lm.config.num_kv_heads} KV heads protected by default")


@group.command()
def alibi_scopes(
    out: Out,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
) -> None:
    """Bound how far every head sees, from the weights alone (ALiBi models; for razor)."""
    from kvjax.calibrate.alibi import alibi_scopes as bound
    from kvjax.cli import first_steps
    from kvjax.policies.head_choice import scope_lengths
    from kvjax.policies.profile import BOUNDS
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    lm = first_steps.load(model, dtype, weights=weights)
    with counting("layers") as shown:
        profile = bound(lm, progress=shown.update)
    save_profile(profile, out)
    for kind in BOUNDS:
        scopes = scope_lengths(profile, kind, 0.001, lm.config.attention_scale)
        lengths = [length for heads in scopes for length in heads]
        short = sum(length < lm.config.max_position for length in lengths)
        print(f"{out}: {kind} bound: {short} of {len(lengths)} heads see less than the context; least {min(lengths):,}")


@group.command()
def watershed(
    out: Out,
    dialogues: Annotated[
        Path,
        typer.Option(
            "--dialogues", help="Your dialogues, as JSON (lines): messages, ShareGPT, LongChat topics or LongMemEval."
        ),
    ],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    most: Annotated[int, typer.Option("--most", help="Dialogues to read, from the file's beginning.")] = 40,
    least_rounds: Annotated[int, typer.Option("--least-rounds", help="Skip dialogues with fewer rounds.")] = 8,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Cut dialogues to their last tokens; by default to the context.")
    ] = None,
    prominence: Annotated[
        float,
        typer.Option("--prominence", help="How much the curve must rise around the minimum, as a fraction of it."),
    ] = 0.5,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw the KL curve, as a PNG.")] = None,
) -> None:
    """Find the layer from which on layers agree about which rounds matter (for round).

    Reads real dialogues, one layer at a time: the memory is that of the weights and one layer.
    """
    from kvjax.calibrate.curve import kl_curve
    from kvjax.calibrate.divergence import watershed as find
    from kvjax.cli import first_steps
    from kvjax.eval.dialogues import long_dialogues
    from kvjax.figures import require_matplotlib
    from kvjax.files import write_atomically
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    whole_number("--most", most, 1)
    whole_number("--least-rounds", least_rounds, 2)
    if picture is not None:
        require_matplotlib()
        check_picture("--picture", picture)
    check_file("--dialogues", dialogues)
    lm = first_steps.load(model, dtype, weights=weights)
    long = long_dialogues(lm, dialogues, most=most, least_rounds=least_rounds, tokens=tokens)
    pairs = [(dialogue.messages(), dialogue.questions[0].text) for dialogue in long]
    with counting("dialogues") as shown:
        profile = find(lm, pairs, prominence=prominence, progress=shown.update)
    save_profile(profile, out)
    if picture is not None:
        write_atomically(picture, kl_curve(profile))
    print(f"{out}: the watershed is layer {profile.watershed} of {lm.config.num_layers}")


@group.command()
def qfilters(
    out: Out,
    texts: Texts,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    most: Annotated[int, typer.Option("--most", help="Pieces to read.")] = 32,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a piece, or what fits the context.")] = 1024,
) -> None:
    """Find the direction that each head's queries share, from texts (for qfilters)."""
    from kvjax.calibrate.filters import query_filters
    from kvjax.cli import first_steps
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    whole_number("--most", most, 1)
    whole_number("--tokens", tokens, 2)
    read = read_texts(texts)
    lm = first_steps.load(model, dtype, weights=weights)
    with counting("pieces") as shown:
        profile = query_filters(lm, read, tokens=tokens, most=most, progress=shown.update)
    save_profile(profile, out)
    print(f"{out}: filters of {len(profile.filters)} layers, from {profile.tokens:,} tokens")


@group.command()
def statistics(
    out: Out,
    texts: Texts,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    most: Annotated[int, typer.Option("--most", help="Pieces to read, drawn from the longest.")] = 32,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a piece, or what fits the context.")] = 1024,
    sink: Annotated[int, typer.Option("--sink", help="First tokens of each piece whose queries do not count.")] = 4,
    seed: Annotated[int, flag.option("seed")] = 0,
) -> None:
    """Average each head's queries and keys over texts (for expected_attention and keydiff)."""
    from kvjax.calibrate.statistics import check, text_statistics
    from kvjax.cli import first_steps
    from kvjax.policies.profile_files import save_profile

    check_out(out)
    with inputs.naming_flags("tokens", "most", "sink", "seed"):
        check(tokens=tokens, most=most, sink=sink, seed=seed)
    read = read_texts(texts)
    lm = first_steps.load(model, dtype, weights=weights)
    with counting("pieces") as shown:
        profile = text_statistics(lm, read, tokens=tokens, most=most, sink=sink, seed=seed, progress=shown.update)
    save_profile(profile, out)
    print(f"{out}: statistics of {profile.shape.num_layers} layers, from {profile.tokens:,} tokens")


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written before minutes are spent."""
    check_writable("--out", out)
    if out.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--out is {out}; a profile is a .yaml file.")


def read_texts(paths: list[Path]) -> list[str]:
    """The texts of files; one sentence on what is none."""
    read = []
    for path in paths:
        check_file("--texts", path)
        try:
            read.append(path.read_text("utf-8-sig"))  # with or without a byte-order mark
        except (OSError, ValueError) as error:
            raise UsageError(f"--texts {path} cannot be read: {reason(error)}.") from error
    return read


def counting(unit: str) -> AbstractContextManager[Stage]:
    """The stage that counts layers or dialogues."""
    return stage("job", "kvjax calibrate:", unit=unit)
