"""Read another framework's configuration and state the objective it runs. Torch only to compare two by numbers."""

from __future__ import annotations

from pathlib import Path

from gropius.audit import openrlhf, trl, verl
from gropius.audit.dialect import Dialect
from gropius.audit.report import Audit, audit, recipe
from gropius.audit.sources import read_text
from gropius.errors import GropiusError, UsageError, did_you_mean

__all__ = ["DIALECTS", "Audit", "Dialect", "audit", "audit_file", "recipe"]

DIALECTS: dict[str, Dialect] = {d.name: d for d in (trl.DIALECT, verl.DIALECT, openrlhf.DIALECT)}


def audit_file(path: Path, framework: str, processes: int = 1) -> Audit:
    """Audit the configuration in a file. framework: a name in DIALECTS.

    Errors: UsageError for an unknown framework or a file that cannot be read as one of its configurations;
    SafetyRefusal for a pickle.
    """
    if framework not in DIALECTS:
        raise UsageError(f'--from "{framework}" is unknown; {did_you_mean(framework, DIALECTS)}')
    dialect = DIALECTS[framework]
    text = read_text(path)
    try:
        return audit(dialect.parse(text, path.suffix.lower()), dialect, str(path), processes)
    except GropiusError as error:
        raise type(error)(f"{path}: {error}") from error
