"""Tasks of lm-evaluation-harness whose items are a list of rows: written to a file, because the harness reads files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any


def with_data(folder: pathlib.Path, name: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a task, ``task["config"]``, that reads ``task["rows"]`` from a file of this folder."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in task["rows"]), encoding="utf-8")
    data = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}
    source = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    return {"task": name, **source, **task["config"]}
