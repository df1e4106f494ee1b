"""What verbs print: data on stdout, messages on stderr; every text of foreign origin made harmless first."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def inert(text: str) -> str:
    """Text that a terminal only shows: control, escape and bidirectional characters are written as escapes.

    >>> inert("a\\x1b[31m\\tb")
    'a\\\\x1b[31m\\tb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def print_json(value: Any) -> None:
    """Print strict JSON on stdout. Errors: ValueError for a number that is not finite."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_text(*lines: str) -> None:
    """Print lines on stdout, made inert."""
    sys.stdout.write("".join(inert(line) + "\n" for line in lines))


def say(text: str) -> None:
    """Print a line on stderr, made inert."""
    sys.stderr.write(inert(text) + "\n")
    sys.stderr.flush()


def show_error(error: Exception) -> None:
    """Print an error's message on stderr; several faults are counted and listed."""
    faults = str(error).splitlines()
    if len(faults) > 1:
        say("\n".join([f"gropius: {len(faults)} faults", *(f"  {fault}" for fault in faults)]))
    else:
        say(f"gropius: {error}")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table on stdout: by rich on a terminal, aligned columns otherwise.

    left: how many columns are words, left-aligned; the others are numbers, right-aligned.
    """
    cells = [[inert(cell) for cell in row] for row in (header, *rows)]
    if sys.stdout.isatty():
        _rich_table(cells, left)
        return
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        padded = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        sys.stdout.write("  ".join(padded).rstrip() + "\n")


def _rich_table(cells: Sequence[Sequence[str]], left: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(cells[0]):
        table.add_column(Text(name), justify="left" if index < left else "right", overflow="fold")
    for row in cells[1:]:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def number(value: object, digits: int = 4) -> str:
    """A number for a column, short; a dash for none.

    >>> number(0.5), number(3), number(None), number(1e-7), number(-0.0)
    ('0.5', '3', '–', '1e-07', '0')
    """
    if value is None:
        return "–"
    return f"{value + 0.0:.{digits}g}" if isinstance(value, float) else str(value)  # + 0.0 turns -0 into 0
