"""Reads which modules import which out of the source, without importing anything."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The packages whose imports of each other are followed.
PACKAGES = ("kvjax", "pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Import:
    """One import statement between modules of this project.

    Attributes:
      source, target: dotted module names.
      line: of the statement, from 1.
    """

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package stands for its ``__init__.py``."""
    found: dict[str, Path] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path, packages: Sequence[str] = PACKAGES) -> list[Import]:
    """Every import between modules of the packages, those inside functions too.

    Imports under ``if TYPE_CHECKING:`` are left out: they do not run.
    """
    known = modules(root, packages)
    found: list[Import] = []
    for name, path in known.items():
        is_package = path.name == "__init__.py"
        for target, line in _statements(ast.parse(path.read_text(encoding="utf-8")), name, is_package, known):
            if target in known and target != name:
                found.append(Import(name, target, line))
    return list(dict.fromkeys(found))


def _statements(node: ast.AST, name: str, is_package: bool, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _statements(ast.Module([other], []), name, is_package, known)
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, child.lineno
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = name.split(".")
                above = above[: len(above) - child.level + is_package]
                base = ".".join([*above, *([child.module] if child.module else [])])
            for alias in child.names:
                inside = f"{base}.{alias.name}"
                yield (inside if inside in known else base), child.lineno
        else:
            yield from _statements(child, name, is_package, known)


def circle(edges: Sequence[Import]) -> list[str]:
    """The modules of one circle of imports, in order; empty when there is none."""
    targets: dict[str, list[str]] = {}
    for edge in edges:
        targets.setdefault(edge.source, []).append(edge.target)
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for target in targets.get(name, ()):
            found = search(target, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for start in targets:
        found = search(start, [])
        if found:
            return found
    return []
