"""HTML as text, every piece of foreign text escaped and made visible. No torch."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

STYLE = """
.gropius{--ink:#1c1b19;--soft:#66625b;--line:#e2dfd8;--accent:#2450b8;--minus:#b2431b;--warn:#7d5200}
.gropius{color:var(--ink);font:14px/1.5 "Inter","Helvetica Neue","Segoe UI","Noto Sans CJK SC",Arial,sans-serif}
.gropius h1{font-size:26px;letter-spacing:-.018em;margin:0 0 4px}.gropius h2{font-size:15px;margin:32px 0 10px;
border-top:1px solid var(--ink);padding-top:8px}.gropius h3{font-size:14px;margin:20px 0 6px}
.gropius .quiet,.gropius caption,.gropius thead th{color:var(--soft);font-weight:400}
.gropius .wide{overflow-x:auto}
.gropius table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:8px 0}
.gropius td,.gropius th{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);text-align:left;
vertical-align:baseline;font-weight:400}
.gropius .n{text-align:right}.gropius .plus{color:var(--accent)}.gropius .minus{color:var(--minus)}
.gropius pre,.gropius .formula{font:12.5px/1.6 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre-wrap;overflow-wrap:anywhere;margin:0;unicode-bidi:isolate}
.gropius .odd{color:var(--warn);border:1px solid;border-radius:3px;padding:0 2px;font-size:11px}
.gropius .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:18px}
.gropius .charts img{width:100%;height:auto}.gropius figure{margin:0}.gropius figcaption{font-weight:560}
.gropius .finding{border-left:3px solid var(--warn);padding-left:12px;margin:0 0 10px}
"""


def text(value: object) -> str:
    """Escaped text in which control, format and unassigned characters are named instead of obeyed.

    >>> text("<b>\\u202e")
    '&lt;b&gt;<span class="odd">U+202E</span>'
    """
    out = []
    for letter in str(value):
        if letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            out.append(f'<span class="odd">U+{ord(letter):04X}</span>')
        else:
            out.append(html.escape(letter))
    return "".join(out)


def number(value: float | int | None, *, sign: bool = False) -> str:
    """A number for reading, with a true minus; a dash for none.

    >>> number(-0.5), number(None), number(0.25, sign=True)
    ('−0.5', '–', '+0.25')
    """
    if value is None or value != value:
        return "–"
    return (f"{value:+.4g}" if sign else f"{value:.4g}").replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table: `words` columns of words, the first of them the row's name, then numbers.

    Cells are markup already: use `text` and `number`.
    """

    def kind(i: int) -> str:
        return " class=n" if i >= words else ""

    top = "".join(f'<th scope="col"{kind(i)}>{cell}</th>' for i, cell in enumerate(head))
    lines = (
        "".join(f'<th scope="row">{c}</th>' if i == 0 else f"<td{kind(i)}>{c}</td>" for i, c in enumerate(row))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def signed(value: float | None) -> str:
    """A number coloured by its sign."""
    shown = number(value, sign=value is not None and value > 0)
    return f'<span class="{"plus" if value and value > 0 else "minus" if value and value < 0 else ""}">{shown}</span>'


def page(title: str, body: str) -> str:
    """A whole document that needs nothing from elsewhere and may load nothing."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    frame = "body{margin:0;background:#fbfaf8}main{max-width:1100px;margin:0 auto;padding:28px 24px 80px}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{frame}{STYLE}</style></head>"
        f'<body><main class="gropius">{body}</main></body></html>\n'
    )
