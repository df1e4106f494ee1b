"""Runs, groups and objectives that show themselves in a notebook. No torch.

from gropius.viewer.notebook import RunView
run = RunView("runs/arithmetic")      # its curves
run.group("000012-0003")              # one group
run.objective                         # the formula
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.objective.spec import Objective
from gropius.viewer.curves import run_page, series
from gropius.viewer.index import RunIndex
from gropius.viewer.markup import STYLE, text
from gropius.viewer.report import charts_html, find_group, findings_html, group_html, objective_html, summary_html
from gropius.viewer.store import RunStore


@dataclass(frozen=True)
class GroupView:
    """One group; `detail` holds its numbers as the viewer shows them."""

    detail: dict[str, Any]

    def _repr_html_(self) -> str:
        return _fragment(group_html(self.detail))


@dataclass(frozen=True)
class ObjectiveView:
    """An objective as its formula."""

    objective: Objective

    def _repr_html_(self) -> str:
        return _fragment(objective_html(self.objective))


class RunView:
    """A run folder. Errors: RunFolderError when there is none."""

    def __init__(self, folder: str | Path) -> None:
        self.store = RunStore("run", Path(folder))

    @property
    def objective(self) -> ObjectiveView:
        """What the run optimises; the default objective when the folder does not say."""
        return ObjectiveView(self.store.objective() or Objective())

    def group(self, group_id: str) -> GroupView:
        """One group by its id. Errors: RunFolderError when it is not there."""
        return GroupView(find_group(self.store, self._index(), group_id))

    def _index(self) -> RunIndex:
        index = RunIndex(self.store, None)
        index.wait()
        return index

    def _repr_html_(self) -> str:
        run, curves = run_page(self.store), series(self.store, self._index())["series"]
        return _fragment(
            f"<h1>{text(run['name'])}</h1>{summary_html(run, curves)}{charts_html(curves)}{findings_html(run)}"
        )


def _fragment(body: str) -> str:
    return f'<style>{STYLE}</style><div class="gropius">{body}</div>'
