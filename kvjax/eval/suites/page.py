"""A report as one HTML file, with its pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape

from kvjax.tables import Heading, Picture, Report, Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; color: #1a1a1a;
  background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; margin-top: 1.5rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; white-space: nowrap; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; }
th.right, td.right { text-align: right; font-variant-numeric: tabular-nums; }
td.note { white-space: normal; color: #a00; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e6e6e6; } th, td { border-color: #444; } img { background: #fff; }
  figcaption { color: #aaa; } td.note { color: #f99; } }
"""


def page(report: Report, title: str, pictures: Mapping[str, bytes]) -> str:
    """The whole report as HTML that needs no other file; ``pictures`` are PNG files by the path in the report."""
    parts = "\n".join(_part(part, pictures) for part in report.parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{parts}\n</body>\n</html>\n"
    )


def _part(part: Heading | Table | Picture | str, pictures: Mapping[str, bytes]) -> str:
    if isinstance(part, Heading):
        return f"<h2>{escape(part.text)}</h2>"
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    if isinstance(part, Picture):
        data = base64.b64encode(pictures[part.path]).decode("ascii")
        caption = escape(part.caption)
        return (
            f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return _table(part)


def _table(table: Table) -> str:
    marks = [' class="right"' if column.right else "" for column in table.columns]
    head = "".join(f"<th{mark}>{escape(name)}</th>" for name, mark in zip(table.header, marks, strict=True))
    rows = []
    for row, cells in zip(table.rows, table.cells, strict=True):
        note = table.note(row)
        shown = cells if note is None else cells[: table.labels]
        line = "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(shown, marks, strict=False))
        if note is not None:
            line += f'<td class="note" colspan="{len(cells) - table.labels}">{escape(note)}</td>'
        rows.append(f"<tr>{line}</tr>")
    title = f"<h3>{escape(table.title)}</h3>\n" if table.title else ""
    body = "\n".join(rows)
    return f'{title}<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
