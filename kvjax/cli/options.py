"""Flags that several commands share, and those that are made of :class:`kvjax.options.GenerationOptions`."""

import functools
import inspect
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import config_files, inputs
from kvjax.options import FIELDS, GenerationOptions
from kvjax.progress import showing

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(
        "--model", help="A built-in name, a GGUF file, a Hugging Face folder or hub id, or a hub id with :FILE.gguf."
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default what suits the device.")
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="int8, int4 or fp8 quantises the matrices, file keeps those of a quantised checkpoint; by default floats "
        "of --dtype.",
    ),
]
Mesh = Annotated[
    str | None, typer.Option("--mesh", help="Devices to shard over, such as data=4,model=2; by default one.")
]
Once = Annotated[
    bool,
    typer.Option("--once", help="The policy chooses among the context alone: what is asked later is all kept."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of text.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown instead of a table.")]
Retained = Annotated[str, typer.Option("--retained", help="Comma-separated fractions of the tokens to keep.")]
CompileCache = Annotated[
    bool,
    typer.Option(
        "--compile-cache/--no-compile-cache", help="Whether compiled programs are kept on disk for later processes."
    ),
]
_LAUNCHED = "Not needed under SLURM, GKE or Open MPI, or on a TPU pod."
Coordinator = Annotated[str | None, typer.Option("--coordinator", help=f"HOST:PORT of process 0. {_LAUNCHED}")]
NumProcesses = Annotated[
    int | None,
    typer.Option("--num-processes", help=f"Processes of the job; 1 joins no other. {_LAUNCHED}"),
]
ProcessId = Annotated[int | None, typer.Option("--process-id", help=f"Number of this process, from 0. {_LAUNCHED}")]
HeartbeatTimeout = Annotated[
    int, typer.Option("--heartbeat-timeout", help="Seconds until a silent process counts as dead.")
]
Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        help="YAML files of flags, such as configs/policies/lagkv-quarter.yaml; the command line wins.",
        callback=config_files.apply,
        is_eager=True,
    ),
]

#: Options that are not typed as what they are: the type of the flag, how to write it, and what reads it.
_TYPED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "stop": (list[str] | None, "may be given several times", lambda texts: tuple(texts or ())),
    "stop_token_ids": (str | None, "separated by commas", functools.partial(inputs.integers, name="--stop-token-ids")),
    "memory_limit": (str | None, "such as 8GB", inputs.byte_count),
    "progress": (bool | None, "only on a terminal when not given", lambda shown: shown),
}
# Policies and storages are written as text.
_TYPES = typing.get_type_hints(GenerationOptions, localns={"Policy": str, "Storage": str})
#: The text of what None means. A command whose default is None tells it from what was typed.
_NONE = {"policy": "full", "storage": "model"}
_DEFAULTS = {name: _NONE.get(name, field.default) for name, field in FIELDS.items()} | {"stop": None}


def option(name: str, none: str | None = None, how: str | None = None) -> Any:
    """The flag of one option of a generation, for ``Annotated``.

    ``none`` is shown where the default is None, and ``how`` in place of how the option is written elsewhere.
    """
    field, switch = FIELDS[name], "--" + name.replace("_", "-")
    how = f"; {how or _TYPED[name][1]}." if name in _TYPED else "."
    if field.default is True or name == "progress":
        switch = f"{switch}/--no-{switch[2:]}"
    shown = True if none is None else none
    return typer.Option(switch, help=field.metadata["help"].removesuffix(".") + how, show_default=shown)


Storage = Annotated[str, option("storage")]


def generation(*names: str, without: Collection[str] = (), **defaults: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a command: in place of its parameter ``options`` there are the flags of a generation's options.

    Args:
      names: the options, all by default. without: options that the command does not take.
      defaults: its own, in place of the library's.

    The command is called with ``options``, a dictionary of the library's keywords, and what goes on in it is shown as
    ``--progress`` says.
    """
    chosen = [name for name in names or FIELDS if name not in without]

    def flag(name: str) -> inspect.Parameter:
        default = defaults.get(name, _DEFAULTS[name])
        kind = _TYPED[name][0] if name in _TYPED else _TYPES[name]
        logs = "in logs a line every ten seconds" if name == "progress" and default is True else None
        annotation = Annotated[kind, option(name, _NONE.get(name) if default is None else None, logs)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(command: Callable[..., Any]) -> Any:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            typed = {name: values.pop(name) for name in chosen}
            read = {name: _TYPED[name][2](value) if name in _TYPED else value for name, value in typed.items()}
            for name, value in read.items():
                if type(value) in (int, float):  # by its flag: options of policies are called seed, too
                    FIELDS[name].metadata["check"](f"--{name.replace('_', '-')}", value)
            with showing(read.pop("progress", None)):
                return command(**values, options=read)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += [flag(name) for name in chosen] if parameter.name == "options" else [parameter]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
