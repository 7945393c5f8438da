"""``kvjax batch``: joins the other processes, loads the model on each, and runs the job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax import tables
from kvjax.cli import session
from kvjax.errors import UsageError

if TYPE_CHECKING:
    from kvjax.batch import Report

INTERRUPTED = 130


def run(
    input: Path,
    output: Path,
    *,
    model: str,
    dtype: str | None,
    mesh: str | None,
    cluster: dict[str, Any],
    keywords: dict[str, Any],
    compile_cache: bool,
) -> int:
    """Answer the file; 130 when Ctrl-C ended it."""
    from kvjax.policies import parse
    from kvjax.runtime.distributed import Cluster, group, local_mesh
    from kvjax.sharding.mesh import parse_mesh

    with Cluster(**cluster).joined():
        everyone = group()
        try:
            with everyone.together():
                parse(keywords["policy"])  # a misspelt policy, or mesh, is said before the model is loaded
                whole = parse_mesh(mesh)
                if not input.is_file():
                    raise UsageError(f"--input names no file: {input}.")
                if compile_cache:
                    session.enable_compile_cache()
                import kvjax.batch

                lm = session.load(model, dtype, None if whole is None else local_mesh(whole))
                report = kvjax.batch.run(lm, input, output, **keywords)
        except KeyboardInterrupt:
            print(f"kvjax batch: what is answered is in {output}; the same command goes on from there", file=sys.stderr)
            return INTERRUPTED
        if everyone.process == 0:
            _print(report, output)
    return 0


def _print(report: Report, output: Path) -> None:
    parts = [f"{report.answered:,} answered"]
    if report.failed:
        parts.append(f"{report.failed:,} refused, each with its error in the output")
    if report.already:
        parts.append(f"{report.already:,} written by earlier runs")
    if report.generated_tokens:
        parts.append(f"{tables.human_rate(report.generated_tokens / report.seconds)} tokens/s")
    print(
        f"kvjax batch: {'; '.join(parts)}; {len(report.files)} file{'s' * (len(report.files) > 1)} in {output}",
        file=sys.stderr,
    )
