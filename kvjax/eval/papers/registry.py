"""The papers by name."""

from __future__ import annotations

from kvjax.errors import UsageError, quoted
from kvjax.eval.papers import ahakv, lagkv, razor, round_attention, slimkv
from kvjax.eval.papers.paper import Ground, Paper

#: The suite's name, which is no one's benchmark: it asks several.
NAME = "papers"
PAPERS: dict[str, Paper] = {one.PAPER.name: one.PAPER for one in (razor, round_attention, ahakv, slimkv, lagkv)}


def find_papers(names: tuple[str, ...]) -> list[Paper]:
    """The papers of those names, all without any; UsageError names the known ones."""
    for name in names:
        if name not in PAPERS:
            raise UsageError(f"The suite {NAME} has no task {quoted(name)}; it has {', '.join(PAPERS)}.")
    if len(set(names)) < len(names):
        raise UsageError("A task is named twice; name each once.")
    return [PAPERS[name] for name in names or PAPERS]


def grounds(papers: list[Paper]) -> list[Ground]:
    """Every ground that a study of these papers asks, once."""
    return list(dict.fromkeys(study.ground for paper in papers for study in paper.studies))
