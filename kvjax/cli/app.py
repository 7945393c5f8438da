"""The commands and their flags. Nothing heavy is imported before the arguments are parsed."""

from pathlib import Path
from typing import Annotated

import typer

import kvjax
from kvjax.cli import app_batch, app_bench, app_eval, calibrate
from kvjax.cli import options as flag

app = typer.Typer(
    help="Generate with language models whose KV cache is really compressed.",
    add_completion=False,
    pretty_exceptions_enable=False,  # main.py prints one sentence instead
    rich_markup_mode=None,
)

app.add_typer(calibrate.app, name="calibrate")
app.add_typer(app_bench.app, name="bench")
app.command()(app_bench.tune)
app.command()(app_batch.batch)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvjax {kvjax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or several; `-` reads standard input.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    policy: flag.Policy = "full",
    storage: flag.Storage = "model",
    context: Annotated[
        str | None, typer.Option("--context", help="Text (or @FILE) compressed once, asked about by every prompt.")
    ] = None,
    chat: flag.Chat = True,
    max_new_tokens: flag.MaxNewTokens = 256,
    temperature: flag.Temperature = 0.0,
    top_k: flag.TopK = None,
    top_p: flag.TopP = 1.0,
    min_p: flag.MinP = 0.0,
    repetition_penalty: flag.RepetitionPenalty = 1.0,
    seed: flag.Seed = 0,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt.")] = 1,
    stop: flag.Stop = None,
    stop_token_ids: flag.StopTokenIds = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also the log-probability of every token.")] = False,
    memory_limit: flag.MemoryLimit = None,
    mesh: flag.Mesh = None,
    json: flag.Json = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Answer prompts.

    Text goes to standard output as it is made; progress and a table of stats go to standard error.
    """
    from kvjax.cli import generate as command
    from kvjax.cli import inputs

    keywords = dict(
        policy=policy,
        storage=storage,
        context=inputs.text_or_file(context, "--context"),
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        stop_token_ids=inputs.integers(stop_token_ids, "--stop-token-ids"),
        logprobs=logprobs,
        memory_limit=inputs.byte_count(memory_limit),
    )
    prompts = inputs.prompts(prompt)
    return command.run(
        prompts, model=model, dtype=dtype, mesh=mesh, keywords=keywords, as_json=json, compile_cache=compile_cache
    )


@app.command()
def chat(
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    policy: flag.ChatPolicy = None,
    storage: flag.ChatStorage = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the conversation to this folder after every turn.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", help="Continue the conversation of this folder; --save DIR too keeps it.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="Told to the model before the first turn.")] = None,
    max_new_tokens: flag.MaxNewTokens = 512,
    temperature: flag.Temperature = 0.0,
    top_k: flag.TopK = None,
    top_p: flag.TopP = 1.0,
    min_p: flag.MinP = 0.0,
    repetition_penalty: flag.RepetitionPenalty = 1.0,
    seed: flag.Seed = 0,
    stop: flag.Stop = None,
    memory_limit: flag.MemoryLimit = None,
    mesh: flag.Mesh = None,
    json: flag.Json = False,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Talk with a model over one compressed cache, or (--policy round) over rounds in host memory.

    At a terminal, /reset starts over, /stats shows the last turn's numbers, /save DIR does what --save does and /exit
    leaves. Piped input is one turn a line.
    """
    from kvjax.cli import chat as command
    from kvjax.cli import inputs

    keywords = dict(
        policy=policy,
        storage=storage,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        memory_limit=inputs.byte_count(memory_limit),
    )
    folders = dict(save=save, load=load)
    return command.run(
        model=model, dtype=dtype, mesh=mesh, keywords=keywords, as_json=json, compile_cache=compile_cache, **folders
    )


@app.command()
def plan(
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of the longest prompt.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    policy: flag.Policy = "full",
    storage: flag.Storage = "model",
    batch: Annotated[int, typer.Option("--batch", help="Prompts answered together.")] = 1,
    max_new_tokens: flag.MaxNewTokens = 256,
    memory_limit: flag.MemoryLimit = None,
    mesh: flag.Mesh = None,
    json: flag.Json = False,
) -> None:
    """Say every byte a request would allocate."""
    from kvjax.cli import inputs
    from kvjax.cli import plan as command

    keywords = dict(
        prompt_tokens=prompt_tokens,
        policy=policy,
        storage=storage,
        batch=batch,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        mesh=mesh,
        memory_limit=inputs.byte_count(memory_limit),
    )
    command.run(model=model, keywords=keywords, as_json=json)


@app.command()
def policies(json: flag.Json = False) -> None:
    """List the policies, their options and defaults."""
    from kvjax.cli import policies as command

    command.run(as_json=json)


@app.command()
def fetch(model: Annotated[str, typer.Argument(help="A built-in name or a hub id.")] = flag.DEFAULT_MODEL) -> None:
    """Put a model in the user's cache.

    Downloads nothing when it is there already; prints its path.
    """
    from kvjax.cli import fetch as command

    command.run(model)


app.command()(app_eval.compare)
app.command()(app_eval.compare_rounds)
app.command()(app_eval.picture)
