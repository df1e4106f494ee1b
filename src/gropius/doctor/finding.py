"""What a diagnostic says: a finding with its rows and its interval, or why it was skipped. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["note", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "critical")
MOST_ROWS = 8


@dataclass(frozen=True)
class Interval:
    """A measured number with its 95 % interval. of: what it is, with its unit."""

    of: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.of} {self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Row:
    """One row of the record that a finding rests on. member: None when the whole group is meant; text: how it begins.

    group_id: None for a step as a whole (a metric).
    """

    step: int
    group_id: str | None = None
    member: int | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; absent fields are left out."""
        fields = {"step": self.step, "group_id": self.group_id, "member": self.member, "text": self.text or None}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Finding:
    """What one diagnostic found.

    step: onset, the first step it holds at. message: what is seen. cause: what most likely makes it so. key: the recipe
    key to change. change: to what. measured: the number it fired on. evidence: rows. explained_by: the finding that
    this one is a consequence of; "" for a root.
    """

    name: str
    severity: Severity
    step: int
    message: str
    cause: str
    key: str
    change: str
    measured: Interval
    evidence: tuple[Row, ...] = ()
    explained_by: str = ""

    @property
    def alarming(self) -> bool:
        """True when it is a root and more than a note."""
        return self.severity != "note" and not self.explained_by

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: what findings.json holds of it."""
        return {
            "name": self.name,
            "severity": self.severity,
            "step": self.step,
            "message": self.message,
            "cause": self.cause,
            "key": self.key,
            "change": self.change,
            "measured": {
                "of": self.measured.of,
                "value": self.measured.value,
                "low": self.measured.low,
                "high": self.measured.high,
            },
            "evidence": [row.as_dict() for row in self.evidence[:MOST_ROWS]],
            "explained_by": self.explained_by,
        }


@dataclass(frozen=True)
class Skipped:
    """A diagnostic that the log cannot support. missing: the fields it lacks; hint: where they would come from."""

    name: str
    missing: tuple[str, ...]
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.name}: the log has no {', '.join(self.missing)}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class Amount:
    """How much of something a diagnostic needs, and how much there is. of: what is counted.

    >>> str(Amount("steps", 10, 3))
    '10 steps (there are 3)'
    """

    of: str
    least: int
    there: int

    def __str__(self) -> str:
        return f"{self.least:,} {self.of} ({'there is' if self.there == 1 else 'there are'} {self.there or 'none'})"


@dataclass(frozen=True)
class Waiting:
    """A diagnostic that found nothing on too little data to say so. needs: what there is too little of."""

    name: str
    needs: tuple[Amount, ...]

    def __str__(self) -> str:
        return f"{self.name}: needs {' and '.join(map(str, self.needs))}"


@dataclass(frozen=True)
class Examination:
    """Everything the doctor has to say about one log.

    findings: roots first, by severity, then what they explain. passed: diagnostics that found nothing on enough data.
    waiting: those that found nothing on too little. skipped: those the log cannot support. notes: how it was read.
    """

    source: str
    steps: int
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Roots above a note."""
        return tuple(finding for finding in self.findings if finding.alarming)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "steps": self.steps,
            "findings": [finding.as_dict() for finding in self.findings],
            "passed": list(self.passed),
            "waiting": [{"name": w.name, "needs": [vars(amount) for amount in w.needs]} for w in self.waiting],
            "skipped": [{"name": s.name, "missing": list(s.missing), "hint": s.hint} for s in self.skipped],
            "notes": list(self.notes),
        }
