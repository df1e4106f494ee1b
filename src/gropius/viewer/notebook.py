"""Runs, groups and objectives that show themselves in a notebook. No torch.

import gropius
run = gropius.open_run("runs/arithmetic")     # its curves and findings
run.objective                                 # the formula; an `Objective` of your own shows itself too
run.groups(12)                                # the groups of a step
run.group("000012-0003")                      # one of them; .detail holds its numbers
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import RunFolderError
from gropius.objective.spec import Objective
from gropius.viewer.curves import run_page, series
from gropius.viewer.foreign import opened
from gropius.viewer.groups import ROW_FIELDS
from gropius.viewer.index import RunIndex, step_groups
from gropius.viewer.markup import STYLE, number, table, text
from gropius.viewer.report import charts_html, find_group, findings_html, group_html, objective_html, summary_html
from gropius.viewer.store import strict


@dataclass(frozen=True)
class GroupView:
    """One group; `detail` holds its numbers as the viewer shows them."""

    detail: dict[str, Any]

    def _repr_html_(self) -> str:
        return _fragment(group_html(self.detail))


@dataclass(frozen=True)
class GroupsView:
    """The groups of one step; `rows` holds a dict for each."""

    step: int
    rows: list[dict[str, Any]]

    def _repr_html_(self) -> str:
        head = ("group", "task", "state", "rewards", "mean", "std", "longest")
        return _fragment(f"<h3>Groups of step {self.step}</h3>{table(head, map(_row, self.rows), words=3)}")


@dataclass(frozen=True)
class ObjectiveView:
    """An objective as its formula."""

    objective: Objective

    def _repr_html_(self) -> str:
        return _fragment(objective_html(self.objective))


class RunView:
    """A run folder, or the log of another trainer. Errors: RunFolderError when it is neither."""

    def __init__(self, folder: str | Path) -> None:
        self._files = contextlib.ExitStack()
        self.store = self._files.enter_context(opened(Path(folder)))

    @property
    def objective(self) -> ObjectiveView:
        """What the run optimises; the default objective when the folder does not say."""
        return ObjectiveView(self.store.objective() or Objective())

    def group(self, group_id: str) -> GroupView:
        """One group by its id. Errors: RunFolderError when it is not there."""
        return GroupView(find_group(self.store, self._index(), group_id))

    def groups(self, step: int | None = None) -> GroupsView:
        """The groups of a step, by default the last. Errors: RunFolderError when it has no responses."""
        steps = self.store.steps()
        chosen = step if step is not None else (steps[-1] if steps else 0)
        found = step_groups(self.store, chosen) if chosen in steps else None
        if found is None:
            raise RunFolderError(f"{self.store.reader.folder}: no responses of step {chosen}")
        return GroupsView(chosen, strict(found.select(ROW_FIELDS).to_pylist()))

    def _index(self) -> RunIndex:
        index = RunIndex(self.store, None)
        index.wait()
        return index

    def _repr_html_(self) -> str:
        run, curves = run_page(self.store), series(self.store, self._index())["series"]
        return _fragment(
            f"<h1>{text(run['name'])}</h1>{summary_html(run, curves)}{charts_html(curves)}{findings_html(run)}"
        )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    rewards = " ".join(number(reward) for reward in row["rewards"][:16])
    more = " …" if row["size"] > 16 else ""
    state = row["state"].replace("_", " ") or "not trained"
    return (text(row["group_id"]), text(row["task_key"]), state, rewards + more, number(row["mean"]),
            number(row["std"]), number(row["longest"]))  # fmt: skip


def _fragment(body: str) -> str:
    sheet = "background:#fbfaf8;padding:8px 16px;overflow-x:auto"  # ink on paper in a dark notebook too
    return f'<style>{STYLE}</style><div class="gropius" style="{sheet}">{body}</div>'
