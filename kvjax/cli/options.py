"""The flags that several commands share; each is named as the library's keyword and says the same."""

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli import config_files

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[str, typer.Option("--model", help="A built-in name, a GGUF file, a Hugging Face folder or hub id.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; the device decides when not given.")]
Policy = Annotated[str, typer.Option("--policy", help="Such as lagkv:ratio=0.25,sink=16; see `kvjax policies`.")]
Storage = Annotated[str, typer.Option("--storage", help="What the cache's rows are stored as: model or int8.")]
# A conversation that is loaded has its own; None is what was not said.
ChatPolicy = Annotated[
    str | None,
    typer.Option("--policy", help="Such as lagkv:ratio=0.25,sink=16; see `kvjax policies`.", show_default="full"),
]
ChatStorage = Annotated[
    str | None,
    typer.Option("--storage", help="What the cache's rows are stored as: model or int8.", show_default="model"),
]
Mesh = Annotated[
    str | None, typer.Option("--mesh", help="Devices to spread over, such as data=4,model=2; one when not given.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="0 runs the prompt only.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sample among the k likeliest tokens.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample among the fewest tokens that hold this probability.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest's probability.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 discourages seen tokens.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the random numbers.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")]
StopTokenIds = Annotated[
    str | None, typer.Option("--stop-token-ids", help="Comma-separated ids that end the text, besides the model's.")
]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Whether the prompt goes through the chat template.")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Refuse more than this, such as 8GB; the device's when not given.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of text.")]
CompileCache = Annotated[
    bool,
    typer.Option("--compile-cache/--no-compile-cache", help="Whether compiled programs are kept in the user's cache."),
]
Config = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        help="YAML files of flags, such as configs/policies/lagkv-quarter.yaml; flags that are typed win.",
        callback=config_files.apply,
        is_eager=True,
    ),
]
