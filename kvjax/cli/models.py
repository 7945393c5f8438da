"""``kvjax models``: what can be loaded: the built-in models, and the architectures of files and hub ids."""

from __future__ import annotations

from kvjax import tables
from kvjax.cli import options as flag
from kvjax.cli.app import app


@app.command()
def models(json: flag.Json = False) -> None:
    """List the built-in models and the supported architectures."""
    from kvjax.checkpoints import hub
    from kvjax.checkpoints.families import FAMILIES, gguf_name
    from kvjax.checkpoints.families.refused import REFUSED

    built_in = [
        {"name": name, "bytes": file.size, "cached": hub.is_cached(name), "from": f"{file.project} {file.version}"}
        for name, file in hub.KNOWN.items()
    ]
    architectures = [{"architecture": name, "gguf": gguf_name(name)} for name in sorted(FAMILIES)]
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(REFUSED.items()):
        reasons.setdefault(reason, []).append(name)
    refused = [{"architectures": names, "reason": reason} for reason, names in reasons.items()]
    if json:
        tables.print_json({"built_in": built_in, "architectures": architectures, "refused": refused})
        return
    named = (
        tables.Column("built in", "name"),
        tables.Column("size", "bytes", tables.human_bytes, right=True),
        tables.Column("downloaded", "cached", lambda there: "yes" if there else "no"),
        tables.Column("from the package index", "from"),
    )
    supported = (tables.Column("architecture", "architecture"), tables.Column("in GGUF", "gguf", missing="-"))
    tables.Report([
        tables.Table(named, built_in),
        "Every other model is a GGUF file, a folder in Hugging Face's form, a hub id (org/name) or a GGUF of one "
        "(org/name:file.gguf), of one of these architectures (model_type of its config.json, general.architecture of a "
        "GGUF):",
        tables.Table(supported, architectures),
        "Refused on purpose:",
        tables.Table(
            (tables.Column("architectures", "architectures", "\n".join), tables.Column("because", "reason")), refused
        ),
    ]).print()  # fmt: skip
