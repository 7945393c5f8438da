"""Draw the documentation's pictures of the command line from a real terminal: tmux, 80 columns by 24 lines.

    python scripts/terminal_pictures.py [NAME ...]

Each picture is a command that runs in tmux with the default model, what is typed into it, and the moments at which the
pane is captured. What is typed and compiled goes to a temporary folder; the model is that of the user's cache folder,
which also tells how fast prompts were read before.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 80, 24
#: Seconds until what is waited for must have appeared.
_PATIENCE = 600


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of one command.

    Attributes:
      command: as typed. keys: what is typed then, each after the pattern before it has appeared.
      until: pattern at whose appearance the pane is captured.
    """

    command: str
    until: str
    keys: tuple[tuple[str, tuple[str, ...]], ...] = ()


_TEXT = "docs/guides/conversations.md"
ALL = {
    "terminal-chat": Picture(
        "kvjax chat --policy lagkv:ratio=0.5 --max-new-tokens 60",
        "Which is the largest",
        (
            ("> $", ("Name three planets.", "Enter")),
            (r"> Name three(?s:.*)\n> $", ("/help", "Enter")),
            (r"pasted text(?s:.*)> $", ("Which is the largest?",)),
        ),
    ),
    "terminal-compiling": Picture('kvjax generate "Name three planets."', r"compiling .* of 2\), [2-9] s"),
    "terminal-prefill": Picture(
        f'kvjax generate "Summarise this." --context @{_TEXT} --policy lagkv:ratio=0.25', r"prefill ~[1-9].* left"
    ),
    "terminal-policies": Picture("kvjax policies | head -20", r"(?s)policy.*\$ $"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", choices=[*ALL], help="pictures to draw; all when none is given")
    names = parser.parse_args().name or list(ALL)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            with terminal(Path(folder)) as pane:
                draw(name, ALL[name], pane)
            print(PICTURES / f"{name}.svg")


class Pane:
    """A pane of tmux with a shell in it."""

    def __init__(self, socket: str):
        self._tmux = ["tmux", "-L", socket]

    def run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, *keys: str) -> None:
        for key in keys:
            self.run("send-keys", key)
            time.sleep(0.3)

    def text(self, *, styled: bool = False) -> str:
        return self.run("capture-pane", "-p", *(["-e"] if styled else []))

    def wait(self, pattern: str) -> None:
        """Wait until the pane's text matches a pattern."""
        until = time.monotonic() + _PATIENCE
        while not re.search(pattern, "\n".join(line.rstrip("\n") for line in self._lines()), re.MULTILINE):
            if time.monotonic() > until:
                raise SystemExit(f"{pattern!r} did not appear in\n{self.text()}")
            time.sleep(0.1)

    def _lines(self) -> list[str]:
        """Its lines; a prompt keeps the space that capturing drops."""
        lines = self.text().rstrip("\n").split("\n")
        return [f"{line} " if line in (">", "$") else line for line in lines]


@contextmanager
def terminal(folder: Path) -> Iterator[Pane]:
    """A terminal with a plain shell, where ``kvjax`` is this working tree's."""
    socket = f"kvjax-pictures-{os.getpid()}"
    environment = {
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder / "state"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "PS1": "$ ",
    }
    script = folder / "shell"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    command = f'kvjax() {{ {shlex.quote(sys.executable)} -m kvjax "$@"; }}'
    script.write_text(f"{exports}cd {shlex.quote(str(ROOT))}\n{command}\n")
    pane = Pane(socket)
    size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
    pane.run("new-session", "-d", *size, f"bash --noprofile --rcfile {shlex.quote(str(script))}")
    try:
        yield pane
    finally:
        pane.run("kill-server")


def draw(name: str, picture: Picture, pane: Pane) -> None:
    """Run a picture's command and draw what the pane shows at the end."""
    pane.wait(r"^\$ $")
    pane.type(picture.command, "Enter")
    for pattern, keys in picture.keys:
        pane.wait(pattern)
        pane.type(*keys)
    pane.wait(picture.until)
    shown = Text.from_ansi(pane.text(styled=True).rstrip("\n"))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown, soft_wrap=True)
    svg = console.export_svg(title=picture.command.split(" --")[0], theme=MONOKAI, unique_id=name)
    # The reader's own font; nothing is fetched from elsewhere.
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
