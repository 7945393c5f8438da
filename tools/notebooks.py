"""Writes what all notebooks share into them, after ``colab/first_cell.py`` changed: ``python -m tools.notebooks``.

The notebooks stay as they are otherwise, and have no outputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLAB = Path(__file__).resolve().parent.parent / "colab"
#: Ends each notebook's introduction.
BEFORE = " ".join(
    """**Before the first cell.** kvjax is not on PyPI yet, so a fresh Colab has to be told where it is. Either upload
its wheel (`pip wheel --no-deps .` in a clone makes one) or the repository as `kvjax.zip` (`git archive -o kvjax.zip
HEAD`) with Files, in the side bar, or set `SOURCE` in the first cell to a path, or to a git address that the Colab can
reach, such as `git+https://HOST/NAME/kvjax`. From a clone on your own machine there is nothing to do. The cell installs
the JAX that belongs to the runtime's accelerator; where another one was loaded before, it restarts the runtime, and is
then to be run again.""".split()
)
_MARK = "**Before the first cell.**"


def with_first_cell(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the shared explanation and first cell in place of its own."""
    introduction, first, *rest = notebook["cells"]
    text = "".join(introduction["source"]).partition(_MARK)[0] + BEFORE
    code = (COLAB / "first_cell.py").read_text(encoding="utf-8").removesuffix("\n")
    cells = [introduction | {"source": _lines(text)}, first | {"source": _lines(code)}, *rest]
    return notebook | {"cells": cells}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def written(path: Path) -> str:
    """The text that a notebook's file should hold."""
    notebook = with_first_cell(json.loads(path.read_text(encoding="utf-8")))
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the first cell into every notebook."""
    for path in sorted(COLAB.glob("*.ipynb")):
        path.write_text(written(path), encoding="utf-8")


if __name__ == "__main__":
    main()
