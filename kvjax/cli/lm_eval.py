"""``kvjax lm-eval``: lm-evaluation-harness's own command, with the model ``kvjax``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvjax.cli.app import app


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(
    context: typer.Context,
    harness_help: Annotated[
        bool, typer.Option("--harness-help", help="Print the flags of lm-evaluation-harness.")
    ] = False,
) -> int:
    """Ask lm-evaluation-harness's tasks of a compressed cache.

    Flags are the harness's own, such as --tasks, --limit, --num_fewshot and --output_path; --model is kvjax. Of its
    --model_args it takes name, policy, storage, weights, dtype, mesh, batch_size, max_length, way, question_separator,
    seed and compile_cache; a policy's commas are written as semicolons.
    """
    from kvjax.eval.harness import command

    return command.run([*context.args, *(["--help"] if harness_help else [])])
