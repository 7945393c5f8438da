"""Runs the pages of ``docs/howto`` as a reader would: every block, in order, exactly as it is printed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.M | re.S
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
      language: the word after the fence, such as "python".
      title: the file that the reader is told to save it as, or None.
      body: its text. line: the line of its fence, from 1.
    """

    language: str
    title: str | None
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that name a language."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["options"])
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], title[1] if title else None, body, line))
    return found


def run_page(path: Path, tmp_path: Path, namespace: dict[str, Any], startup: str = "") -> dict[str, Any]:
    """Run a page in the folder ``tmp_path`` and return the namespace of its python blocks.

    A block with ``title="FILE"`` is saved as that file, from where later blocks import it. Other python blocks run here
    and share ``namespace``. A bash block runs in a shell of its own, where ``python`` and ``kvjax`` are this
    environment's, and must succeed; every Python in it runs ``startup`` first. Blocks of other languages are not run.
    """
    environment = _environment(tmp_path, startup)
    with _inside(tmp_path):
        for block in blocks(path):
            if block.title is not None:
                (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / block.title).write_text(block.body, encoding="utf-8")
            elif block.language == "python":
                # Blank lines before the code, so that an error names the page's own line.
                code = "\n" * block.line + block.body
                exec(compile(code, str(path), "exec", dont_inherit=True), namespace)
            elif block.language == "bash":
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block.body],
                    capture_output=True,
                    text=True,
                    cwd=tmp_path,
                    env=environment,
                )
                assert done.returncode == 0, f"{path.name}:{block.line}: {block.body}\n{done.stdout}\n{done.stderr}"
    return namespace


def _environment(folder: Path, startup: str) -> dict[str, str]:
    """The shell's environment: this Python first, this checkout importable, ``startup`` run by every Python."""
    hooks = folder / ".startup"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(startup, encoding="utf-8")
    places = [str(hooks), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder whose modules can be imported, and forget those modules afterwards."""
    before = set(sys.modules)
    with contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]
