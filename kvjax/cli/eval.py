"""``kvjax eval``: a benchmark asked of every policy's cache and of the full one; one report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.checks import whole_number
from kvjax.cli import first_steps, inputs
from kvjax.cli import options as flag
from kvjax.cli.app import INTERRUPTED, app
from kvjax.errors import UsageError
from kvjax.held_folder import held
from kvjax.progress import showing
from kvjax.tables import counted

if TYPE_CHECKING:
    from kvjax.checkpoints.load import LanguageModel
    from kvjax.eval.entries import Entry
    from kvjax.eval.suites.data import DataFolder
    from kvjax.eval.suites.item import Asked, Suite
    from kvjax.eval.suites.journal import Journal, RunSettings
    from kvjax.eval.suites.runner import Runner
    from kvjax.runtime.distributed import Group

_say = functools.partial(first_steps.say, "eval")
_POLICIES, _RETAINED = "snapkv,lagkv", "0.5,0.25"


@app.command("eval")
def evaluate(
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            help="ruler, passkey, needle-map, longbench, longbench-v2, longmemeval, scbench, scbench-requests, rounds, "
            "dialogues, short; or papers, which compares the caches of the five papers' tables and figures.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for answers and report; a run begun there is resumed.")],
    model: flag.Model = flag.DEFAULT_MODEL,
    config: flag.Config = None,
    dtype: flag.Dtype = None,
    weights: flag.Weights = None,
    mesh: flag.Mesh = None,
    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            help="Such as 'snapkv;lagkv:lag=64,sink=4'; `kvjax policies` lists them. The full cache always runs.",
        ),
    ] = _POLICIES,
    retained: flag.Retained = _RETAINED,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with the files of benchmarks, which docs/guides/evaluation.md lists."),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks", help="The suite's tasks, separated by commas, all by default; a wrong name lists them."
        ),
    ] = "",
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            help="Tokens of the longest prompt with its answer; by default the suite's own, or the model's context.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", help="Questions of each task, or of each cell of a map; by default the suite's own number."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few, short prompts, mostly of 1,024 tokens, to see that everything runs.")
    ] = False,
    in_view: Annotated[
        bool, typer.Option("--in-view", help="Compress context and question together, not the context alone.")
    ] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts answered together.")] = 2,
    storage: flag.Storage = "model",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the samples and of the bootstrap.")] = 42,
    coordinator: flag.Coordinator = None,
    num_processes: flag.NumProcesses = None,
    process_id: flag.ProcessId = None,
    heartbeat_timeout: flag.HeartbeatTimeout = 30,
    compile_cache: flag.CompileCache = True,
) -> int:
    """Run a benchmark on compressed caches and the full one.

    Scores with standard errors, paired differences from the full cache, bytes and speed go to report.html, report.md
    and report.json; raw answers to answers.jsonl. Interrupted or killed, the same command resumes. Processes of many
    hosts that are started with the same command and a folder that they share divide the questions.
    """
    from kvjax.cache.quantisation import parse_storage
    from kvjax.cli.eval_papers import papers
    from kvjax.eval.entries import entries
    from kvjax.eval.papers.measured import Options
    from kvjax.eval.papers.registry import NAME as PAPERS
    from kvjax.eval.suites.data import DataFolder
    from kvjax.eval.suites.journal import RunSettings
    from kvjax.eval.suites.registry import asked_of, find_suite
    from kvjax.eval.suites.runner import AFTER, IN_VIEW
    from kvjax.runtime.distributed import Cluster, group

    cluster = Cluster(coordinator, num_processes, process_id, heartbeat_timeout)
    with cluster.joined():
        everyone = group()
        first = everyone.process == 0  # it tells for all, and holds the folder
        with everyone.together(), contextlib.nullcontext() if first else showing(False):
            whole_number("--batch-size", batch_size, 1)
            parse_storage(storage)
            folder = DataFolder(data)
            if data is not None and not data.is_dir():
                raise UsageError(f"--data names no folder: {data}.")
            first_steps.check_results(out)
            named = inputs.names(tasks, "--tasks")
            holding = held("--out", out) if first else contextlib.nullcontext()
            if suite == PAPERS:
                _refuse_others(suite, in_view, policies, retained, mesh)
                options = Options(model, dtype, weights, quick, length, limit, seed, storage, batch_size)
                with holding:
                    return papers(out, named, options, folder, compile_cache, everyone)
            chosen = find_suite(suite)
            compared = entries(policies, inputs.numbers(retained, "--retained"))
            asked = asked_of(chosen, folder, tasks=named, length=length, limit=limit, seed=seed, quick=quick)
            if length is None:
                asked = dataclasses.replace(asked, length=first_steps.within_context(model, asked.length))
            settings = RunSettings(
                model, dtype, weights, suite, asked.tasks, asked.length, asked.limit, quick, seed,
                IN_VIEW if in_view else AFTER, storage, batch_size,
            )  # fmt: skip
            first_steps.check_length(model, asked.length)
            load = functools.partial(_load, settings, mesh, everyone, compile_cache)
            with holding:
                return _run(load, chosen, folder, asked, settings, out, compared, everyone)


def _load(settings: RunSettings, mesh: str | None, everyone: Group, compile_cache: bool) -> LanguageModel:
    """The model, on this process' devices of the mesh."""
    from kvjax.runtime.distributed import local_mesh
    from kvjax.sharding.mesh import parse_mesh

    devices = parse_mesh(mesh) if everyone.processes > 1 else None
    here = mesh if devices is None else local_mesh(devices)
    dtype, weights = settings.dtype, settings.weights
    return first_steps.load(settings.model, dtype, here, compile_cache=compile_cache, weights=weights)


def _refuse_others(suite: str, in_view: bool, policies: str, retained: str, mesh: Any) -> None:
    """Refuse (UsageError) options that the studies of papers decide themselves, and a mesh."""
    if mesh is not None:
        raise UsageError(f"The studies of {suite} run on one device; leave --mesh out.")
    if in_view:
        raise UsageError(f"Each study of {suite} says when its questions are asked; leave --in-view out.")
    if (policies, retained) != (_POLICIES, _RETAINED):
        raise UsageError(f"Each study of {suite} has caches of its own; leave --policies and --retained out.")


def _run(
    load: Callable[[], LanguageModel],
    suite: Suite,
    data: DataFolder,
    asked: Asked,
    settings: RunSettings,
    out: Path,
    compared: Sequence[Entry],
    everyone: Group,
) -> int:
    """Ask what the journal does not hold yet, and write the report of all of it."""
    from kvjax.bench import machine
    from kvjax.eval.entries import profile_of
    from kvjax.eval.suites import folder, hosts
    from kvjax.eval.suites.journal import Journal
    from kvjax.eval.suites.runner import Runner
    from kvjax.eval.suites.scores import lines

    journal = Journal(out / folder.JOURNAL, settings, everyone.process)
    caches = {"policies": [(one.name, one.retained, profile_of(one)) for one in compared]}
    hosts.agree(everyone, "command", dataclasses.asdict(settings) | caches)
    lm = load()
    first = everyone.process == 0
    code = 0
    refused: dict[tuple[str, float | None], str] = {}
    items: list[Any] = []
    try:
        with everyone.together():
            items = suite.items(lm, data, asked)
            if not items:
                raise UsageError(f"The suite {suite.name} has no questions of {', '.join(asked.tasks)}.")
            runner = Runner(lm, items, journal, _say if first else lambda _: None, everyone)
            refused = runner.refused
            runner.begin(compared)
            if first:
                _announce(lm, runner, journal, len(items), compared)
            runner.run(compared)
            if not first:
                answered = counted(runner.answered, "question")
                _say(f"process {everyone.process} answered {answered}; process 0 writes the report of all")
    except KeyboardInterrupt:
        journal.read_again()
        kept = f"what is answered is in {out}" if journal.answers else "nothing was answered yet"
        _say(f"{kept}; the same command goes on from there")
        code = INTERRUPTED
    finally:
        journal.close()
        journal.drop_empty()
    if not first:
        return code
    if journal.answers and items:
        found = lines(items, journal, compared, refused)
        shown = folder.write(out, suite, journal.settings, found, machine.describe(), data.found)
        shown.print(width=160)
        print(f"Saved: {out / folder.PAGE}, {folder.MARKDOWN}, {folder.NUMBERS}, {folder.JOURNAL}.")
    elif refused:
        raise UsageError(next(iter(refused.values())))
    return code


def _announce(lm: LanguageModel, runner: Runner, journal: Journal, questions: int, compared: Sequence[Entry]) -> None:
    """Say how many answers an earlier run left, and about how long the others take."""
    from kvjax.eval.entries import resolved
    from kvjax.eval.suites import estimate
    from kvjax.eval.suites.runner import IN_VIEW

    missing, whole = runner.missing(compared), questions * len(compared)
    if whole > missing:
        _say(counted(whole - missing, "answer of an earlier run is kept", "answers of an earlier run are kept"))
    if missing:
        policies = resolved(compared, lm.config, later=journal.settings.mode != IN_VIEW)
        spent = estimate.seconds(lm, runner.batches, policies) * missing / whole
        _say(
            f"{counted(questions, 'question')} of {counted(len(compared), 'cache')}: "
            f"about {estimate.in_words(spent)} if answers are as long as they may be, and programs are compiled besides"
        )
