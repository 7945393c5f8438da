"""The documentation builds without a warning, and nothing in it or in the README leads nowhere."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. ``--strict`` makes every warning a failure: dead links and anchors, pages in no menu, names that
    the API reference does not find.
    """
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site):
    for page in PAGES:
        path = page.relative_to(DOCS).with_suffix("")
        built = site / path.parent / "index.html" if path.name == "index" else site / path / "index.html"
        assert built.stat().st_size > 2000, page


def test_the_reference_has_every_public_name(site):
    html = "".join(
        (site / "reference" / page / "index.html").read_text(encoding="utf-8") for page in ("api", "policies")
    )
    # Modules' names have no capitals: a method of the same name, such as Chat.load, is another thing.
    missing = [name for name in kvjax.__all__ if not re.search(rf'id="kvjax\.([a-z0-9_]+\.)*{name}"', html)]
    # These modules, and a second name of a class, stand there by what they hold.
    assert set(missing) <= {"batch", "policies", "progress", "Razor"}, missing
    assert 'id="kvjax.policies.base.Policy.select"' in html


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert len(links) > 3
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_picture_is_shown():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (DOCS / "pictures").iterdir():
        assert f"pictures/{picture.name}" in pages, picture.name


def test_what_the_architecture_names_is_there():
    """Modules and functions, named from their room on or from a package, and methods of policies."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.name for path in (ROOT / "kvjax").iterdir() if path.is_dir()}
    named = [name for name in re.findall(r"`(\w+(?:\.\w+)+)`", text) if not name.endswith((".py", ".md"))]
    named = [f"kvjax.{name}" if name.split(".")[0] in {*rooms, "Policy"} else name for name in named]
    found = [name for name in named if name.split(".")[0] in ("kvjax", "pallas_kernels")]
    assert len(found) > 20
    for name in found:
        assert pkgutil.resolve_name(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_stands_alone(page):
    """One title, first; and text under it, before anything else."""
    lines = page.read_text(encoding="utf-8").splitlines()
    fenced = re.sub(r"```.*?```", "", "\n".join(lines), flags=re.DOTALL)
    assert lines[0].startswith("# ") and len(re.findall(r"^# ", fenced, flags=re.MULTILINE)) == 1
    assert lines[2].strip() and not lines[2].startswith(("#", "|", "!["))
    tables = re.findall(r"(?:^\|.*\n?)+", fenced, flags=re.MULTILINE)
    assert all(re.match(r"\|.*\|\n\|[ :|-]+\|\n", table) for table in tables), "a row apart from its table is text"
