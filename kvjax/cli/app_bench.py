"""The flags of ``kvjax bench`` and ``kvjax tune``. Nothing heavy is imported before the arguments are parsed."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import options as flag

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

SaveJson = Annotated[Path | None, typer.Option("--json", help="Save everything measured to this file.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]


@app.callback(invoke_without_command=True)
def bench(
    context_: typer.Context,
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,8",
    context: Annotated[str, typer.Option("--context", help="Comma-separated tokens in the cache.")] = "256,4096",
    policy: Annotated[list[str] | None, typer.Option("--policy", help="May be given several times.")] = None,
    prefill: Annotated[str, typer.Option("--prefill", help="Comma-separated prompt lengths to time.")] = "2000",
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved repetitions; the median is reported.")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="Tokens decoded in a repetition.")] = 32,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="`transformers`: also time that (torch).")] = None,
    long_steps: Annotated[
        int, typer.Option("--long-steps", help="Also compare a step after 100 and after this many generated tokens.")
    ] = 0,
    startup: Annotated[bool, typer.Option("--startup", help="Also time compilation and a second process.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Save everything measured to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    compile_cache: flag.CompileCache = True,
) -> None:
    """Measure speed, cache bytes and peak memory.

    Decode is also given as a share of the limit: the bytes a step must read at the memory bandwidth measured in the
    same run. `kvjax bench kernels` and `kvjax bench decode` measure kernels alone, and whole steps of a model's shape
    with random weights.
    """
    if context_.invoked_subcommand is not None:
        return
    from kvjax.cli import bench as command
    from kvjax.cli import inputs

    command.run(
        model=model,
        dtype=dtype,
        batches=inputs.integers(batch, "--batch") or (),
        contexts=inputs.integers(context, "--context") or (),
        policies=tuple(policy or ("full",)),
        prefills=inputs.integers(prefill, "--prefill") or (),
        rounds=rounds,
        steps=steps,
        peers=tuple(peer or ()),
        long_steps=long_steps,
        startup=startup,
        json_path=json,
        markdown=markdown,
        compile_cache=compile_cache,
    )


@app.command()
def decode(
    shape: Annotated[str, typer.Option("--shape", help="llama-3.1-8b, smollm2-135m or tiny.")] = "llama-3.1-8b",
    dtype: flag.Dtype = "bfloat16",
    batch: Annotated[str, typer.Option("--batch", help="Comma-separated batch sizes.")] = "1,8,32",
    context: Annotated[str, typer.Option("--context", help="Comma-separated tokens in the cache.")] = "32768",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="May be given several times; by default all, at 1/8 but full."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Repetitions; the median is reported.")] = 5,
    json: SaveJson = None,
    markdown: AsMarkdown = False,
) -> None:
    """Measure whole decode steps of a model's shape with random weights: no weights are needed.

    What random weights have no profile for is made: `razor` protects KV heads spread evenly over the model, which hold
    half of its ratio; `round` has its watershed at 45 % of the layers, and is measured as an answer is decoded, with
    the rounds that were selected (`top`) on the device. Bringing them there is a question's cost, not a step's.
    """
    from kvjax.cli import bench as command
    from kvjax.cli import inputs

    sizes = inputs.integers(batch, "--batch") or (), inputs.integers(context, "--context") or ()
    command.decode(shape, dtype or "bfloat16", *sizes, tuple(policy or ()), rounds, json, markdown)


@app.command()
def kernels(
    mean: Annotated[str | None, typer.Option("--mean", help="Comma-separated slots a head, on average.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Rows.")] = None,
    heads: Annotated[int, typer.Option("--heads", help="KV heads a row.")] = 8,
    group: Annotated[int, typer.Option("--group", help="Query heads that share a KV head.")] = 4,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels of a head.")] = 128,
    dtype: Annotated[str, typer.Option("--dtype", help="Of rows, such as bfloat16, int8, float8_e4m3fn.")] = "bfloat16",
    sigma: Annotated[float, typer.Option("--sigma", help="Log-normal spread of the heads' lengths.")] = 0.8,
    rounds: Annotated[int, typer.Option("--rounds", help="Interleaved repetitions.")] = 10,
    json: SaveJson = None,
) -> None:
    """Measure every decode kernel of this platform, beside what else there is, against the memory's own speed."""
    from kvjax.cli import bench as command
    from kvjax.cli import inputs

    means = () if mean is None else inputs.integers(mean, "--mean") or ()
    sizes = dict(heads=heads, group=group, head_dim=head_dim, dtype=dtype, sigma=sigma)
    command.kernels(means, batch, sizes, rounds, json)


def tune(
    file: Annotated[Path, typer.Argument(help="Where sizes are kept; what it holds of other problems stays.")],
    operation: Annotated[
        list[str] | None,
        typer.Option(
            "--operation",
            help="ragged_decode, prefill, log_sum_exp or attention_mass; may be given several times, else all of them.",
        ),
    ] = None,
    mean: Annotated[int, typer.Option("--mean", help="Slots a head, on average; of ragged_decode.")] = 2048,
    batch: Annotated[int, typer.Option("--batch", help="Rows; of ragged_decode, the others take one.")] = 16,
    heads: Annotated[int, typer.Option("--heads", help="KV heads a row.")] = 8,
    group: Annotated[int, typer.Option("--group", help="Query heads that share a KV head.")] = 4,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels of a head.")] = 128,
    dtype: Annotated[str, typer.Option("--dtype", help="Of rows.")] = "bfloat16",
    queries: Annotated[
        str | None,
        typer.Option("--queries", help="Comma-separated queries of a chunk; by default what each operation meets."),
    ] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Comma-separated tokens of the prompts that chunks end.")
    ] = "4096,32768",
) -> None:
    """Find the fastest block sizes of the kernels on this accelerator, and save them as they are found.

    Each operation's are measured and kept by device, head size, queries a KV head and dtype; ragged_decode's also by
    page size, the others' by whether the queries are a window's 16, 32 or 64, or 128, 256, 512 and more, and whether
    there are 8,192 keys. kvjax uses them where PALLAS_KERNELS_TUNED names the file; what that does not name goes by the
    kernels' own rules.
    """
    from kvjax.cli import bench as command
    from kvjax.cli import inputs

    sizes = dict(mean=mean, batch=batch, heads=heads, group=group, head_dim=head_dim, dtype=dtype)
    counts = inputs.integers(queries, "--queries") or (), inputs.integers(tokens, "--tokens") or ()
    command.tune(file, tuple(operation or ()), sizes, *counts)
