"""Draws the architecture page's picture and table of rooms out of the code's own imports.

    python -m tools.draw_rooms

writes ``docs/pictures/rooms.svg`` and the table between the markers of ``docs/architecture.md``. What a room may
import is the table in ``tests/test_imports.py``; what is drawn is what the code does import.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from kvjax.tables import Column, Table
from tools.imports import imports, modules

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
PAGE = ROOT / "docs" / "architecture.md"
#: What stands in each room, for the table; the picture has the words before the first semicolon.
HOLDS: dict[str, str] = {
    "base": "errors, checks, files, tables, progress, Ctrl-C; what every room may use",
    "pallas_kernels": "attention kernels; a package of its own that knows nothing of kvjax",
    "model": "decoder, RoPE, ALiBi; the configuration and the layer that every family shares",
    "cache": "pages, quantisation; pools of pages, their layouts, what a device holds of them, the cache as a value",
    "policies": "which tokens stay; the `Policy` protocol, one file a policy, calibrated profiles",
    "sharding": "meshes, partitions; which device holds which heads, weights and pages",
    "text": "tokenizers; text to tokens and back",
    "checkpoints": "GGUF, safetensors, hub; model families and their weights on disk",
    "runtime": "compiled programs; prefill, decode, sampling, stopping",
    "planning": "bytes before allocation; prompts as tokens, plans, refusals of what does not fit",
    "rounds": "Round Attention; conversations whose rounds are in host memory",
    "saving": "caches on disk; whole or not at all",
    "request": "options, requests, outputs; what was asked, checked against model and memory",
    "engine": "in-flight batching; slots of one batch through which requests pass",
    "generation": "generate, Chat, history; one call or conversation at a time, and the session that runs it",
    "calibrate": "profiles; retrieval heads, ALiBi scopes, watersheds, filters, text statistics, scorers and gates",
    "batch": "files of prompts; resumable jobs on one process or many",
    "eval": "compare, pictures; needle tasks, dialogues, studies, suites of benchmarks",
    "bench": "speed and bytes; the benchmark of whole models",
    "public": "import kvjax; every public name, loaded when it is first used",
    "cli": "the kvjax command; a file a command",
}
_BEGIN, _END = "<!-- rooms: written by python -m tools.draw_rooms -->", "<!-- end of rooms -->"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 148, 44, 22, 46, 16


def room_imports(room_of: Callable[[str], str]) -> dict[str, set[str]]:
    """The imports of each room."""
    found: dict[str, set[str]] = {}
    for edge in imports(ROOT):
        source, target = room_of(edge.source), room_of(edge.target)
        if source != target:
            found.setdefault(source, set()).add(target)
    return found


def pages(rooms: Mapping[str, str], room_of: Callable[[str], str]) -> dict[Path, str]:
    """The text of the picture and of the architecture page as they should be.

    Args:
      rooms: the table of ``tests/test_imports.py``, from the bottom up.
      room_of: the room of a module.
    """
    made = room_imports(room_of)
    old = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", flags=re.DOTALL)
    assert pattern.search(old), f"{PAGE} has no markers for the table of rooms"
    return {
        PICTURE: picture(list(rooms), made),
        PAGE: pattern.sub(lambda _: f"{_BEGIN}\n{table(rooms, room_files(room_of))}\n{_END}", old),
    }


def room_files(room_of: Callable[[str], str]) -> dict[str, list[str]]:
    """The packages of each room, below ``kvjax/`` but for ``pallas_kernels``, and then its single modules."""
    found: dict[str, set[str]] = {}
    for module, path in modules(ROOT).items():
        package, *below = path.relative_to(ROOT).parts
        file = f"{package}/" if package != "kvjax" else below[0] if len(below) == 1 else f"{below[0]}/"
        found.setdefault(room_of(module), set()).add(file)
    return {room: sorted(files, key=lambda file: (not file.endswith("/"), file)) for room, files in found.items()}


def table(rooms: Mapping[str, str], files: Mapping[str, list[str]]) -> str:
    """The rule as Markdown, from the top down, with the files of each room."""

    def may_import(room: str) -> str:
        return "every room below" if rooms[room] == "*" else ", ".join(rooms[room].split()) or "nothing"

    def where(room: str) -> str:
        beside = ", beside it" if room == "pallas_kernels" else ""
        return ", ".join(f"`{file}`" for file in files[room]) + beside

    columns = [
        Column("room", "`{}`".format),
        Column("holds", HOLDS.__getitem__),
        Column("in `kvjax/`", where),
        Column("may import", may_import),
    ]
    return Table(columns, list(rooms)[::-1]).markdown()


def picture(rooms: list[str], made: Mapping[str, set[str]]) -> str:
    """The rooms as boxes on floors, with an arrow for each import that does not follow from others, as SVG."""
    order = {room: number for number, room in enumerate(rooms)}
    down = {room: {other for other in made.get(room, ()) if order[other] < order[room]} for room in rooms}
    reach: dict[str, set[str]] = {}
    for room in rooms:
        reach[room] = down[room].union(*(reach[other] for other in down[room]))
    # An import is drawn unless it also follows through a room between.
    direct = {
        room: {other for other in down[room] if not any(other in reach[via] for via in down[room])} for room in rooms
    }
    floor: dict[str, int] = {}
    for room in rooms:
        floor[room] = max((floor[other] + 1 for other in direct[room]), default=0)
    rows, paths = _laid_out(rooms, floor, direct)
    return _svg(rows, paths)


def _laid_out(
    rooms: list[str], floor: Mapping[str, int], direct: Mapping[str, set[str]]
) -> tuple[list[list[str]], list[list[str]]]:
    """Rooms and, where an arrow crosses a floor, places for it to pass ("source>target@floor"), ordered on each floor
    so that arrows run short; and each arrow as the places that it passes, from the top down.
    """
    rows: list[list[str]] = [
        [room for room in rooms if floor[room] == level] for level in range(1 + max(floor.values()))
    ]
    paths = []
    for room in rooms:
        for other in sorted(direct[room], key=rooms.index):
            between = [f"{room}>{other}@{level}" for level in range(floor[room] - 1, floor[other], -1)]
            paths.append([room, *between, other])
            for place in between:
                rows[int(place.rpartition("@")[2])].append(place)
    beside: dict[str, list[str]] = {}
    for path in paths:
        for upper, lower in itertools.pairwise(path):
            beside.setdefault(upper, []).append(lower)
            beside.setdefault(lower, []).append(upper)
    for sweep in range(12):
        for row in rows if sweep % 2 else reversed(rows):
            middle = {name: _x(other, i) for other in rows for i, name in enumerate(other)}
            # Stable, so equal places stay in the order of the table.
            row.sort(key=lambda name: sum(middle[other] for other in beside[name]) / len(beside[name]))
    return rows, paths


def _size(name: str) -> int:
    return 18 if "@" in name else _WIDTH


def _x(row: list[str], index: int) -> float:
    """The middle of a place, its row centred on 0."""
    sizes = [_size(name) for name in row]
    left = sum(sizes[:index]) + _GAP_X * index
    return left + sizes[index] / 2 - (sum(sizes) + _GAP_X * (len(row) - 1)) / 2


def _svg(rows: list[list[str]], paths: list[list[str]]) -> str:
    width = max(sum(map(_size, row)) + _GAP_X * (len(row) - 1) for row in rows) + 2 * _MARGIN
    height = len(rows) * _HEIGHT + (len(rows) - 1) * _GAP_Y + 2 * _MARGIN
    at = {
        name: (width / 2 + _x(row, i), _MARGIN + (len(rows) - 1 - level) * (_HEIGHT + _GAP_Y))
        for level, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="Helvetica, Arial, sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#64748b"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for path in paths:
        x, y = at[path[0]]
        curve = f"M{x:.1f} {y + _HEIGHT:.1f}"
        y += _HEIGHT
        for name in path[1:]:
            to_x, to_y = at[name]
            bend = (to_y - y) / 2
            curve += f" C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
            if "@" in name:
                curve += f" L{to_x:.1f} {to_y + _HEIGHT:.1f}"
            x, y = to_x, to_y + _HEIGHT
        out.append(f'<path d="{curve}" fill="none" stroke="#94a3b8" stroke-width="1.2" marker-end="url(#tip)"/>')
    for name, (x, y) in at.items():
        if "@" in name:
            continue
        out.append(
            f'<rect x="{x - _WIDTH / 2:.1f}" y="{y:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#eef2ff" '
            f'stroke="#4f46e5"/><text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle" font-size="13" '
            f'font-weight="bold" fill="#1e1b4b">{escape(name)}</text><text x="{x:.1f}" y="{y + 34:.1f}" '
            f'text-anchor="middle" font-size="10" fill="#334155">{escape(HOLDS[name].split(";")[0])}</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Write both files."""
    from tests.test_imports import ROOMS, room_of

    for path, text in pages(ROOMS, room_of).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
