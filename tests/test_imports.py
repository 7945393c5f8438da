"""The import rule: kvjax is built of rooms, one above the other, and a room imports only from rooms below it.

``ROOMS`` is the whole rule. The architecture page shows the same table and a picture of what the code imports, both
made by ``python -m tools.draw_rooms``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tools.draw_rooms import pages
from tools.imports import Import, circle, modules
from tools.imports import imports as read_imports

ROOT = Path(__file__).resolve().parent.parent

#: Each room, from the bottom up, with the rooms it may import from ("*" is every room below). Imports that only type
#: checkers see do not count.
ROOMS: dict[str, str] = {
    "base": "",
    "pallas_kernels": "",
    "model": "base pallas_kernels",
    "cache": "base pallas_kernels",
    "policies": "base model cache",
    "sharding": "base pallas_kernels model cache policies",
    "text": "base",
    "checkpoints": "base pallas_kernels model sharding text",
    "runtime": "base pallas_kernels model cache policies sharding",
    "planning": "base model cache policies sharding checkpoints runtime",
    "rounds": "base pallas_kernels model cache policies sharding runtime planning",
    "saving": "base cache policies sharding checkpoints planning rounds",
    "request": "base model cache policies sharding text checkpoints runtime planning",
    "engine": "base pallas_kernels model cache policies sharding text checkpoints runtime planning request",
    "generation": "base model cache policies sharding text checkpoints runtime planning rounds saving request engine",
    "calibrate": "base pallas_kernels model cache policies checkpoints runtime planning rounds generation",
    "batch": "base cache policies text checkpoints runtime planning request engine generation",
    "eval": "base pallas_kernels model cache policies text checkpoints runtime planning request generation calibrate",
    "bench": "base pallas_kernels model cache policies text checkpoints runtime request engine generation",
    "public": "base policies",
    "cli": "*",
}

#: Rooms made of single modules; every other room is the package ``kvjax.<room>``, or ``pallas_kernels``. The package
#: ``kvjax`` finds its public names when they are used, and imports only their list.
MODULES: dict[str, str] = {
    "base": "kvjax.version kvjax.errors kvjax.environment kvjax.checks kvjax.documents kvjax.files kvjax.stored_files "
    "kvjax.tables kvjax.compile_cache kvjax.progress kvjax.live_line kvjax.interrupt kvjax.waiting kvjax.figures "
    "kvjax.committed kvjax.held_folder kvjax.array_bytes kvjax.halving",
    "planning": "kvjax.allocation kvjax.memory_needs kvjax.prompts kvjax.device_memory kvjax.chips kvjax.fit",
    "request": "kvjax.options kvjax.controls kvjax.given_caches kvjax.request kvjax.output kvjax.ownership",
    "generation": "kvjax.session kvjax.generation kvjax.chat kvjax.history kvjax.context kvjax.scoring "
    "kvjax.policy_check kvjax.warming",
    "public": "kvjax",
    "cli": "kvjax.__main__ kvjax.cli",
}


@functools.cache
def imports() -> list[Import]:
    """Every import between modules of this project."""
    return read_imports(ROOT)


def room_of(module: str) -> str:
    """The room that a module belongs to."""
    for room, members in MODULES.items():
        if module in members.split():
            return room
    first, *rest = module.split(".")
    room = rest[0] if first == "kvjax" and rest else first
    assert room in ROOMS, f"{module} is in no room; put it into one, or give it a line of ROOMS"
    return room


def allowed(room: str) -> list[str]:
    """The rooms that a room may import from."""
    names = list(ROOMS)
    return names[: names.index(room)] if ROOMS[room] == "*" else ROOMS[room].split()


def violations(edges: list[Import]) -> list[str]:
    """Imports that the table does not allow."""
    found = []
    for edge in edges:
        source, target = room_of(edge.source), room_of(edge.target)
        if source != target and target not in allowed(source):
            found.append(f"{edge}: {source} may not import {target}")
    return found


def test_rooms_import_only_what_they_may():
    found = violations(imports())
    assert not found, "\n".join(found)


def test_the_table_has_no_upward_import():
    """Every room's imports stand above it in the table, so rooms cannot form a circle."""
    below: set[str] = set()
    for room in ROOMS:
        assert set(allowed(room)) <= below, room
        below.add(room)


def test_the_table_allows_nothing_that_nobody_needs():
    """An import that no module makes any more leaves the table, so the table stays true."""
    made = {(room_of(edge.source), room_of(edge.target)) for edge in imports()}
    named = [(room, other) for room, text in ROOMS.items() if text != "*" for other in text.split()]
    unused = [f"{room} -> {other}" for room, other in named if (room, other) not in made]
    assert not unused, unused


def test_every_module_is_in_a_room_that_has_modules():
    assert {room_of(module) for module in modules(ROOT)} == set(ROOMS)


def test_no_modules_import_each_other_in_a_circle():
    found = circle(imports())
    assert not found, " -> ".join([*found, found[0]]) if found else ""


def test_kernels_stand_alone():
    """``pallas_kernels`` imports nothing of kvjax, not even for types."""
    for name, path in modules(ROOT, ("pallas_kernels",)).items():
        text = path.read_text(encoding="utf-8")
        assert "import kvjax" not in text and "from kvjax" not in text, name


def test_the_architecture_page_shows_these_imports():
    for path, text in pages(ROOMS, room_of).items():
        assert path.read_text(encoding="utf-8") == text, "run `python -m tools.draw_rooms` and commit what it writes"


@pytest.fixture
def planted(tmp_path):
    """A project whose cache imports its command line, so that the two import each other."""
    for name, text in {
        "errors.py": "",
        "cache/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kvjax.cli\n",
        "cache/pool.py": "def late():\n    from kvjax import cli\n    return cli\n",
        "cli/__init__.py": "from .main import start\nfrom kvjax.cache import pool\n",
        "cli/main.py": "import kvjax.errors\nstart = kvjax.errors\n",
        "__init__.py": "",
    }.items():
        path = tmp_path / "kvjax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_imports(tmp_path)


def test_planted_violations_are_found(planted):
    assert violations(planted) == ["kvjax.cache.pool:2 imports kvjax.cli: cache may not import cli"]
    assert sorted(circle(planted)) == ["kvjax.cache.pool", "kvjax.cli"]
    assert Import("kvjax.cli", "kvjax.cli.main", 1) in planted
