"""The doctor while a run goes on: what is new since the last look, and whether it is bad enough to pause. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gropius.doctor.finding import SEVERITIES, Finding
from gropius.doctor.run import RunLog
from gropius.doctor.table import examine
from gropius.records.reader import RunReader

PauseOn = Literal["never", "warning", "critical"]


@dataclass(frozen=True)
class Checkup:
    """What one look found. lines: the findings that are new, for a person. rows: all, as findings.json holds them.

    pause: why to pause, or "".
    """

    lines: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    pause: str


class Watch:
    """Looks at one run folder again and again. Findings that the folder already holds are not news.

    pause_on: the least severity of a new root finding that asks for a pause.
    """

    def __init__(self, folder: Path, pause_on: PauseOn = "never") -> None:
        self._log = RunLog(RunReader(folder))
        self._pause_on = pause_on
        stored = self._log.reader.findings()
        self._known = {(str(row.get("name")), str(row.get("severity"))) for row in stored if isinstance(row, dict)}

    def look(self) -> Checkup:
        """Examine the run as it is recorded now."""
        found = examine(self._log.read()).findings
        new = [f for f in found if (f.name, f.severity) not in self._known and not f.explained_by]
        self._known |= {(f.name, f.severity) for f in found}
        serious = [f for f in new if self._asks_for_a_pause(f)]
        return Checkup(
            tuple(_line(f) for f in new),
            tuple(f.as_dict() for f in found),
            "; ".join(f"{f.name}: {f.message}" for f in serious),
        )

    def _asks_for_a_pause(self, finding: Finding) -> bool:
        if self._pause_on == "never":
            return False
        return SEVERITIES.index(finding.severity) >= SEVERITIES.index(self._pause_on)


def _line(finding: Finding) -> str:
    return (
        f"doctor: {finding.name} ({finding.severity}, since step {finding.step}): {finding.message}. "
        f"Likely: {finding.cause}. Change {finding.key}: {finding.change}"
    )
