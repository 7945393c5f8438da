"""``kvjax policies``: the names and options that can be written after --policy."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax import tables
from kvjax.cli import options as flag
from kvjax.cli.app import app


def _describe(policy: type) -> tuple[list[dict[str, Any]], str]:
    from kvjax.policies.inner import Rescoring
    from kvjax.policies.parsing import format_policy, options_of

    fields = []
    needed = [f for f in options_of(policy) if f.default is f.default_factory is dataclasses.MISSING]
    # A default may be chosen when the policy is made, such as its size when none is given.
    made = None if needed else policy()
    for field in options_of(policy):
        if str(field.type).startswith("tuple"):
            continue  # no text says it
        default = None if made is None else getattr(made, field.name)
        if default is None and field.name == "inner" and isinstance(made, Rescoring):
            default = format_policy(made.usual()).partition(":")[0]
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        fields.append({"name": field.name, "type": kind, "required": field in needed, "default": default})
    summary = (policy.__doc__ or "").strip().splitlines()
    return fields, summary[0].replace("``", "") if summary else ""


@app.command()
def policies(json: flag.Json = False) -> None:
    """List the policies, their options and defaults."""
    from kvjax.policies import Best, registry

    described = {name: _describe(policy) for name, policy in sorted((registry() | {"best": Best}).items())}
    if json:
        tables.print_json({name: {"summary": s, "fields": fields} for name, (fields, s) in described.items()})
        return
    columns = (
        tables.Column("policy", lambda row: row[0]),
        tables.Column("options and defaults", lambda row: "\n".join(map(_option, row[1][0])) or "-"),
        tables.Column("what it keeps", lambda row: row[1][1]),
    )
    usage = "Write --policy NAME or NAME:OPTION=VALUE,OPTION=VALUE."
    sliding = "Layers with a sliding window, which some models have, keep its tokens whatever the policy."
    tables.Report([tables.Table(columns, list(described.items())), usage, sliding]).print()


def _option(field: dict[str, Any]) -> str:
    return f"{field['name']} (needed)" if field["required"] else f"{field['name']}={field['default']}"
