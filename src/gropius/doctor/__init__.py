"""What is wrong with a run, from its records alone: findings with their rows, their intervals and the key to change.

from gropius.doctor import examine, read_log
examination = examine(read_log("runs/mine")); examination.findings
"""

from gropius.doctor.finding import Examination, Finding, Interval, Row, Skipped
from gropius.doctor.log import Log
from gropius.doctor.source import read_log
from gropius.doctor.table import DIAGNOSTICS, Diagnostic, examine

__all__ = [
    "DIAGNOSTICS",
    "Diagnostic",
    "Examination",
    "Finding",
    "Interval",
    "Log",
    "Row",
    "Skipped",
    "examine",
    "read_log",
]
