"""Tables of report pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], marked: str = "") -> str:
    """Return a table of text; rows whose first cell is in ``marked`` stand out."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        ('<tr class="base">' if marked and row[0] == marked else "<tr>")
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'
