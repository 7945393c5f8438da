"""``--config FILE``: flags of a command from small YAML files.

A file holds flags by their names, such as ``model: smollm2-135m-instruct``. What is typed on the command line wins,
then the later file. A policy, and a mesh, may be written as the mapping of their fields. What a command does not take
is refused, so that a misspelt name is not silently a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvjax.documents import NotADocument, parse_yaml
from kvjax.errors import UsageError, did_you_mean, listed, quoted
from kvjax.files import read_bytes, reason

#: Bytes of a file at most.
_MOST_BYTES = 1_000_000
_NOT_SETTINGS = ("config", "help")


def apply(context: typer.Context, files: list[Path] | None) -> list[Path] | None:
    """Make the files' values the defaults of the command being parsed; typer calls this before any other flag."""
    flags = {parameter.name: parameter for parameter in context.command.params if parameter.name not in _NOT_SETTINGS}
    values: dict[str, Any] = dict(context.default_map or {})
    for file in files or ():
        for key, value in read(file).items():
            if key not in flags:
                raise UsageError(_unknown(file, key, context.info_name or "", list(flags)))
            values[key] = _as_typed(file, key, value, flags[key])
    context.default_map = values
    return files


def read(file: Path) -> dict[str, Any]:
    """The settings of one file, by the flags' Python names; those written as null are left out."""
    try:
        content = parse_yaml(read_bytes(file, _MOST_BYTES).decode("utf-8"))
    except UsageError:  # it has too many bytes, which is a ValueError too
        raise
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text.") from error
    except NotADocument as error:
        line = "" if error.line is None else f" (line {error.line})"
        why = "" if str(error) == "it is not YAML" else f": {error}"
        raise UsageError(f"{file} is not YAML{line}{why}; write flags such as `policy: lagkv`, one a line.") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--config names a file that cannot be read: {file} ({reason(error)}).") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{file} holds no settings; write flags such as `policy: lagkv`, one a line.")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in settings:
            raise UsageError(f"{file} sets {key} twice; set it once.")
        settings[name] = value
    return {key: value for key, value in settings.items() if value is not None}


def _unknown(file: Path, key: str, command: str, known: Sequence[str]) -> str:
    hint = did_you_mean(key, known) or f" it takes {listed(sorted(known), 100)}."
    return f"{file} sets {quoted(key)}, which `kvjax {command}` does not take;{hint}"


def _as_typed(file: Path, key: str, value: Any, flag: Any) -> Any:
    """A value as it would be typed, so that the flag's own checks read it."""
    if getattr(flag, "is_flag", False):
        if not isinstance(value, bool):
            raise UsageError(f"{file} sets {key} to {quoted(value)}; write true or false.")
        return value
    if isinstance(value, Mapping) and key == "mesh":
        value = _fields(file, value)
    items = [_scalar(file, key, item) for item in (value if isinstance(value, list) else [value])]
    return items if getattr(flag, "multiple", False) else ",".join(items)


def _scalar(file: Path, key: str, value: Any) -> str:
    if isinstance(value, Mapping) and key in ("policy", "policies"):
        return policy_text(file, value)
    if isinstance(value, (bool, list, Mapping)) or value is None:
        raise UsageError(f"{file} sets {key} to {quoted(value)}; write text or a number.")
    return _plain(value)


def policy_text(file: Path, value: Mapping[str, Any], inside: bool = False) -> str:
    """``{lagkv: {ratio: 0.25}}`` as ``lagkv:ratio=0.25``, or as ``lagkv(ratio=0.25)`` inside another policy."""
    if len(value) != 1:
        raise UsageError(f"{file} writes a policy as {quoted(dict(value))}; write one name with its options below it.")
    ((name, options),) = value.items()
    if options is None:
        return str(name)
    if not isinstance(options, Mapping):
        raise UsageError(f"{file} gives the policy {name} {quoted(options)}; write its options as `name: value` lines.")
    text = _fields(file, options)
    if not text:
        return str(name)
    return f"{name}({text})" if inside else f"{name}:{text}"


def _plain(value: Any) -> str:
    """A number or text; of more digits than Python writes, what no check takes for a number."""
    return quoted(value) if isinstance(value, int) else str(value)


def _fields(file: Path, options: Mapping[str, Any]) -> str:
    def item(value: Any) -> str:
        if isinstance(value, Mapping):
            return policy_text(file, value, inside=True)
        return str(value).lower() if isinstance(value, bool) or value is None else _plain(value)

    return ",".join(f"{name}={item(value)}" for name, value in options.items())
