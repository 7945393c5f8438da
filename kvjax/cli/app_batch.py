"""The flags of ``kvjax batch``. Nothing heavy is imported before the arguments are parsed."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import options as flag

_LAUNCHED = "Not needed where SLURM, GKE, a TPU pod or Open MPI tell."


def batch(
    input: Annotated[Path, typer.Option("--input", help="Prompts: .jsonl or .parquet, the same file on every host.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the answers; a job begun there is continued.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Such as data=8,model=4: devices of all hosts.")] = None,
    policy: flag.Policy = "full",
    storage: flag.Storage = "model",
    chat: flag.Chat = True,
    max_new_tokens: flag.MaxNewTokens = 256,
    temperature: flag.Temperature = 0.0,
    top_k: flag.TopK = None,
    top_p: flag.TopP = 1.0,
    min_p: flag.MinP = 0.0,
    repetition_penalty: flag.RepetitionPenalty = 1.0,
    seed: flag.Seed = 0,
    stop: flag.Stop = None,
    stop_token_ids: flag.StopTokenIds = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also the log-probability of every token.")] = False,
    memory_limit: flag.MemoryLimit = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts a process answers together.")] = 8,
    order: Annotated[str, typer.Option("--order", help="Of the output: input or id.")] = "input",
    format: Annotated[
        str | None, typer.Option("--format", help="Of the output: jsonl or parquet; the input's when not given.")
    ] = None,
    shard_rows: Annotated[int | None, typer.Option("--shard-rows", help="Rows of an output file.")] = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", help=f"HOST:PORT of process 0. {_LAUNCHED}")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option("--num-processes", help=f"Of the job; 1 joins nobody. {_LAUNCHED}")
    ] = None,
    process_id: Annotated[int | None, typer.Option("--process-id", help=f"Of this one, from 0. {_LAUNCHED}")] = None,
    heartbeat_timeout: Annotated[
        int, typer.Option("--heartbeat-timeout", help="Seconds until a silent process counts as dead.")
    ] = 30,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Answer a file of prompts, on one machine or many.

    A row is {"prompt", "id"?, "max_new_tokens"?}; a prompt is text, messages or token ids. Interrupted or killed, the
    same command continues. A row that cannot be answered has its error in the output and stops nothing.
    """
    from kvjax.cli import batch as command
    from kvjax.cli import inputs

    keywords = dict(
        policy=policy,
        storage=storage,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=inputs.integers(stop_token_ids, "--stop-token-ids"),
        logprobs=logprobs,
        memory_limit=inputs.byte_count(memory_limit),
        batch_size=batch_size,
        order=order,
        format=format,
        shard_rows=shard_rows,
    )
    return command.run(
        input,
        output,
        model=model,
        dtype=dtype,
        mesh=mesh,
        cluster=dict(
            coordinator=coordinator, num_processes=num_processes, process_id=process_id, heartbeat=heartbeat_timeout
        ),
        keywords=keywords,
        compile_cache=compile_cache,
    )
