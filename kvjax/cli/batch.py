"""``kvjax batch``: joins the other processes, loads the model on each, and runs the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax import tables
from kvjax.cli import first_steps
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError
from kvjax.files import check_local, is_file

if TYPE_CHECKING:
    from kvjax.batch import Report


@app.command()
# A job's log tells how far it is, every ten seconds.
@flag.generation(without=("reserve_tokens",), progress=True)
def batch(
    *,
    input: Annotated[Path, typer.Option("--input", help="Prompts: .jsonl or .parquet, the same file on every host.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the answers; a job begun there is continued.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Such as data=8,model=4: devices of all hosts.")] = None,
    options: dict[str, Any],
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts that a process answers together.")] = 8,
    order: Annotated[str, typer.Option("--order", help="Order of the output: input or id.")] = "input",
    format: Annotated[
        str | None, typer.Option("--format", help="Format of the output: jsonl or parquet; by default the input's.")
    ] = None,
    shard_rows: Annotated[int | None, typer.Option("--shard-rows", help="Rows per output file.")] = None,
    coordinator: flag.Coordinator = None,
    num_processes: flag.NumProcesses = None,
    process_id: flag.ProcessId = None,
    heartbeat_timeout: flag.HeartbeatTimeout = 30,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Answer a file of prompts, on one machine or many.

    A row is {"prompt", "id"?, "max_new_tokens"?}; a prompt is text, messages or token ids. Interrupted or killed, the
    same command continues. A row that cannot be answered has its error in the output and does not stop the job.
    """
    from kvjax.runtime.distributed import Cluster, group, local_mesh
    from kvjax.sharding.mesh import parse_mesh

    job: dict[str, Any] = dict(batch_size=batch_size, order=order, format=format, shard_rows=shard_rows)
    cluster = Cluster(coordinator, num_processes, process_id, heartbeat_timeout)
    with cluster.joined():
        everyone = group()
        try:
            with everyone.together():
                first_steps.check_policy(options["policy"])
                devices = parse_mesh(mesh)
                if not is_file(input):
                    check_local("--input", input)
                    raise UsageError(f"--input names no file: {input}.")
                import kvjax.batch

                here = None if devices is None else local_mesh(devices)
                lm = first_steps.load(model, dtype, here, compile_cache=compile_cache, weights=weights)
                report = kvjax.batch.run(lm, input, output, **options, **job)
        except KeyboardInterrupt:
            print(f"kvjax batch: what is answered is in {output}; the same command goes on from there", file=sys.stderr)
            return INTERRUPTED
        if everyone.process == 0:
            _print(report, output)
    return 0


def _print(report: Report, output: Path) -> None:
    if report.choice:
        print(f"kvjax batch: {report.choice}", file=sys.stderr)
    parts = [f"{report.answered:,} answered"]
    if report.failed:
        parts.append(f"{report.failed:,} refused, each with its error in the output")
    if report.lost:
        names = ", ".join(map(str, report.lost))
        parts.append(f"process{'es' * (len(report.lost) > 1)} {names} lost, whose prompts the others answered")
    if report.already:
        parts.append(f"{report.already:,} written by earlier runs")
    if report.generated_tokens:
        parts.append(f"{tables.human_rate(report.generated_tokens / report.seconds)} tokens/s")
    print(
        f"kvjax batch: {'; '.join(parts)}; {len(report.files)} file{'s' * (len(report.files) > 1)} in {output}",
        file=sys.stderr,
    )
