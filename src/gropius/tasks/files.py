"""Rows from JSONL, JSON, CSV and Parquet, each with the place it came from. No torch.

A row is loaded, or refused by file and row. UTF-8 with or without a byte-order mark, LF or CRLF; `.jsonl` and `.json`
may be gzipped. NaN and Infinity are no JSON. A lone surrogate (half a character, which no tokenizer and no file
takes) is replaced by U+FFFD and counted. JSON lines and Parquet are read as a stream: a line or a batch at a time.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gropius.errors import DataError

REPLACEMENT = "\ufffd"
BATCH_ROWS = 1024
Pairs = Iterable[tuple[str, Any]]


@dataclass(frozen=True)
class Row:
    """One row and where it stands: `place` is `file:row`, the row counted from 1 (the line, for text files)."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """The rows of one source, the columns seen in any of them, and how many strings held a lone surrogate."""

    name: str
    rows: tuple[Row, ...]
    replaced: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column of every row, in the order first seen."""
        return tuple(dict.fromkeys(column for row in self.rows for column in row.values))


def read_rows(file: Path, most: int | None = None) -> Rows:
    """The rows of one file, by its suffix (.jsonl .ndjson .json .csv .parquet, the first three also with .gz).

    most: stop after so many rows; what comes after them is not looked at.
    Raises DataError naming file and row: missing or empty file, unknown suffix, text that is not UTF-8, a broken
    line, a last line that is cut off, NaN, a row that is no object, a CSV row with more cells than the header.
    """
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    reader = READERS.get(suffix.lower())
    if reader is None or (file.suffix == ".gz" and suffix.lower() in (".parquet", ".csv")):
        raise DataError(f"{file}: cannot read this kind of file; write one of {', '.join(READERS)}")
    try:
        rows = clean_rows(file.name, itertools.islice(reader(file), most))
    except (OSError, EOFError, zlib.error) as fault:
        kind = "a whole gzip file" if file.suffix == ".gz" else "readable"
        raise DataError(f"{file}: not {kind}: {fault}") from None
    if not rows.rows:
        raise DataError(f"{file}: the file {'has no rows' if suffix.lower() == '.parquet' else 'is empty'}")
    return rows


def clean_rows(name: str, pairs: Pairs) -> Rows:
    """Rows from (place, values) pairs, lone surrogates replaced. Raises DataError for a row that is no object."""
    rows, replaced = [], 0
    for place, values in pairs:
        if not isinstance(values, Mapping):
            raise DataError(f"{place}: the row is a {type(values).__name__}; write an object with named columns")
        cleaned, count = _without_surrogates(dict(values))
        replaced += count
        rows.append(Row(place, cleaned))
    return Rows(name, tuple(rows), replaced)


def _open(file: Path) -> Any:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")


def _content(file: Path) -> bytes:
    """The whole file, without a byte-order mark."""
    with _open(file) as stream:
        content: bytes = stream.read()
    return content.removeprefix(b"\xef\xbb\xbf")


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                place = f"{file}:{number}"
                whole = line.endswith(b"\n")
                yield place, _parse(place, _decode(place, line.removesuffix(b"\n")), cut_off=not whole)


def _json(file: Path) -> Pairs:
    content = _content(file)
    if not content.strip():
        return []
    parsed = _parse(f"{file}", _decode(f"{file}", content), cut_off=False)
    if isinstance(parsed, dict):
        lists = [value for value in parsed.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(f"{file}: the file holds an object; write a list of rows, or an object with one list in it")
        parsed = lists[0]
    if not isinstance(parsed, list):
        raise DataError(f"{file}: the file holds a {type(parsed).__name__}; write a list of rows")
    if not parsed:
        raise DataError(f"{file}: the file has no rows")
    return [(f"{file}:{number}", values) for number, values in enumerate(parsed, start=1)]


def _csv(file: Path) -> Pairs:
    content = _content(file)
    if not content.strip():
        return []
    text = _decode(f"{file}", content)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    pairs = []
    try:
        for values in reader:
            place = f"{file}:{reader.line_num}"
            if None in values:
                raise DataError(
                    f"{place}: more cells than the header has columns ({', '.join(reader.fieldnames or [])})"
                )
            pairs.append((place, values))
    except csv.Error as fault:
        raise DataError(f"{file}:{reader.line_num}: broken CSV: {fault}") from None
    if not pairs:
        raise DataError(f"{file}: only a header ({', '.join(reader.fieldnames or [])}), no rows")
    return pairs


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", values
    except arrow.ArrowException as fault:
        raise DataError(f"{file}: not a readable Parquet file: {fault}") from None


READERS: dict[str, Callable[[Path], Pairs]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _decode(place: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = content[: fault.start].count(b"\n") + 1
        where = place if content.count(b"\n") == 0 else f"{place}:{line}"
        raise DataError(f"{where}: byte {content[fault.start]:#04x} is not UTF-8; save the file as UTF-8") from None


def _parse(place: str, text: str, *, cut_off: bool) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise DataError(f"{place}: {constant} is not JSON; write null or a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as fault:
        if cut_off:
            raise DataError(f"{place}: the last line is cut off or broken (no line end): {fault.msg}") from None
        raise DataError(f"{place}: broken JSON at column {fault.colno}: {fault.msg}") from None
    except (RecursionError, ValueError) as fault:  # nesting or digits beyond what the parser takes
        raise DataError(f"{place}: JSON that cannot be read: {fault}") from None


def _without_surrogates(value: Any) -> tuple[Any, int]:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return "".join(REPLACEMENT if "\ud800" <= c <= "\udfff" else c for c in value), 1
        return value, 0
    if isinstance(value, Mapping):
        keys = [_without_surrogates(key) for key in value]
        items = [_without_surrogates(item) for item in value.values()]
        cleaned = {key: item for (key, _), (item, _) in zip(keys, items, strict=True)}
        return cleaned, sum(n for _, n in keys) + sum(n for _, n in items)
    if isinstance(value, list):
        items = [_without_surrogates(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    return value, 0
