"""A run as one file that can be mailed: curves, findings, the objective, chosen groups. No script, nothing loaded."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gropius.errors import RunFolderError
from gropius.objective.formula import formula
from gropius.objective.spec import Objective
from gropius.viewer.curves import run_page, series
from gropius.viewer.groups import group_detail, named_groups
from gropius.viewer.index import RunIndex, step_groups
from gropius.viewer.markup import number, page, signed, table, text
from gropius.viewer.plots import draw, drawable
from gropius.viewer.store import RunStore

MOST_GROUPS = 6
LONGEST_TEXT = 4000


def report(store: RunStore, groups: Sequence[str] = ()) -> str:
    """The whole report as HTML.

    groups: ids to show; without any, some are chosen: those that findings name, and of the last step one of every state
    and the one with the largest advantage. Errors: RunFolderError for an id that is not there.
    """
    index = RunIndex(store, None)
    index.wait()
    run, curves = run_page(store), series(store, index)["series"]
    shown = [find_group(store, index, name) for name in groups] if groups else choose_groups(store)
    parts = [f"<h1>{text(run['name'])}</h1>", summary_html(run, curves)]
    parts += [_problems(run), objective_html(store.objective()), charts_html(curves), findings_html(run)]
    if shown:
        parts.append("<h2>Groups</h2>")
        parts += [group_html(found) for found in shown]
    return page(str(run["name"]), "".join(parts))


def write_pictures(store: RunStore, folder: Path) -> list[Path]:
    """Every curve as a PNG. Errors: RunFolderError when the folder cannot be written; UsageError (no matplotlib)."""
    index = RunIndex(store, None)
    index.wait()
    curves = series(store, index)["series"]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in drawable(curves):
            path = folder / f"{plot.name}.png"
            path.write_bytes(draw(plot, curves, "png"))
            written.append(path)
    except OSError as error:
        raise RunFolderError(f"{folder}: pictures cannot be written: {error.strerror}") from error
    return written


def choose_groups(store: RunStore) -> list[dict[str, Any]]:
    """Groups worth a page: named by findings, then one of each state of the last step, the strongest first."""
    wanted: list[tuple[int, str]] = []
    suspects = named_groups(store.findings())
    steps = store.steps()
    for step in reversed(steps):
        table_of = step_groups(store, step) if suspects else None
        if table_of is not None:
            wanted += [(step, name) for name in table_of.column("group_id").to_pylist() if name in suspects]
        if len(wanted) >= MOST_GROUPS // 2:
            break
    last = step_groups(store, steps[-1]) if steps else None
    if last is not None and last.num_rows:
        rows = last.sort_by([("largest_advantage", "descending")]).select(["group_id", "state"]).to_pylist()
        seen: set[str] = set()
        for row in rows:
            if row["state"] not in seen:
                seen.add(row["state"])
                wanted.append((steps[-1], row["group_id"]))
    found = [group_detail(store, step, name) for step, name in dict.fromkeys(wanted[:MOST_GROUPS])]
    return [detail for detail in found if detail is not None]


def find_group(store: RunStore, index: RunIndex, group_id: str) -> dict[str, Any]:
    """A group by its id. Errors: RunFolderError when it is not there."""
    step = step_of(index, group_id)
    detail = group_detail(store, step, group_id) if step is not None else None
    if detail is None:
        raise RunFolderError(f"{store.reader.folder}: no group {group_id}; `gropius show RUN` lists the last step's")
    return detail


def step_of(index: RunIndex, group_id: str) -> int | None:
    """The step a group was drawn in; None when it is not there."""
    table_of = index.groups()
    names = table_of.column("group_id").to_pylist()
    return int(table_of.column("step")[names.index(group_id)].as_py()) if group_id in names else None


def summary_html(run: dict[str, Any], curves: dict[str, Any]) -> str:
    """One line: steps, preset, held-out before and after, group size."""
    of = f" of {run['asked_steps']}" if run["asked_steps"] else ""
    facts = [
        f"{run['steps']}{of} steps",
        f"preset {text(run['preset'])}" if run["preset"] else "objective not recorded",
    ]
    held = curves.get("held_out/mean", {}).get("values")
    if held:
        low, high = (curves.get(f"held_out/mean_{end}", {}).get("values") for end in ("low", "high"))
        interval = f" [{number(low[-1])}, {number(high[-1])}]" if low and high else ""
        facts.append(f"held-out {number(held[0])} → {number(held[-1])}{interval}")
    rollout = run["recipe"].get("rollout") or {}
    if isinstance(rollout, dict) and rollout.get("prompts"):
        facts.append(f"{text(rollout.get('prompts'))} prompts × {text(rollout.get('group_size'))} siblings")
    return f'<p class="quiet">{" · ".join(facts)}</p>'


def _problems(run: dict[str, Any]) -> str:
    return "".join(f'<p class="finding">{text(problem)}</p>' for problem in [*run["notes"], *run["problems"]])


def objective_html(objective: Objective | None) -> str:
    """The formula and every field that differs from the preset grpo."""
    if objective is None:
        return ""
    first, *rest = formula(objective).split("\n")
    lines = "".join(f'<p class="formula quiet">{text(line)}</p>' for line in rest)
    default = Objective().as_dict()
    changed = [
        (f"<code>{axis}.{key}</code>", text(value), text(default[axis][key]))
        for axis, fields in objective.as_dict().items()
        for key, value in fields.items()
        if value != default[axis][key]
    ]
    return (
        f'<h2>Objective</h2><p class="formula">{text(first)}</p>{lines}'
        + (table(("field", "here", "grpo"), changed) if changed else "")
    )  # fmt: skip


def charts_html(curves: dict[str, Any]) -> str:
    """Every curve as a picture in the file itself, with its first and last value in words."""
    figures = []
    for plot in drawable(curves):
        picture = base64.b64encode(draw(plot, curves, "svg")).decode()
        values = next(curves[name]["values"] for name, _, _ in plot.lines if curves.get(name, {}).get("values"))
        words = f"{plot.title}: from {number(values[0])} to {number(values[-1])}"
        figures.append(
            f"<figure><figcaption>{text(plot.title)}</figcaption>"
            f'<img alt="{text(words)}" src="data:image/svg+xml;base64,{picture}"></figure>'
        )
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>' if figures else ""


def findings_html(run: dict[str, Any]) -> str:
    """What the doctor found."""
    rows = [
        f'<p class="finding"><strong>{text(f.get("name", ""))}</strong> {text(f.get("message") or f.get("text") or "")}'
        + (f'<br><span class="quiet">{text(f["change"])}</span>' if f.get("change") else "")
        + "</p>"
        for f in run["findings"]
    ]
    return "<h2>Findings</h2>" + "".join(rows) if rows else ""


def group_html(detail: dict[str, Any]) -> str:
    """One group: its prompt, the arithmetic of its advantages, and the siblings' texts."""
    responses = detail["responses"]
    replay = detail["replay"] or {}
    rows = [("reward", *(number(r["reward"]) for r in responses))]
    for name in ("baseline", "centred", "scale"):
        if name in replay:
            rows.append((name, *(number(value) for value in replay[name])))
    rows.append(("<strong>advantage</strong>", *(signed(r["advantage"]) for r in responses)))
    rows.append(("tokens", *(number(r["tokens"]) for r in responses)))
    head = ("", *(f"#{r['member']}" for r in responses))
    texts = "".join(
        f"<tr><th scope=row>#{r['member']}<br>{signed(r['advantage'])}</th><td><pre>{text(_cut(r['text']))}</pre>"
        f'<span class="quiet">{text(", ".join(filter(None, (r["status"] or "", r["finish_reason"], r["reason"]))))}'
        "</span></td></tr>"
        for r in responses
    )
    state = text(detail["state"].replace("_", " ") or "not trained")
    return (
        f'<h3>{text(detail["group_id"])} <span class="quiet">step {detail["step"]} · {text(detail["task_key"])} · '
        f"{state}</span></h3><pre>{text(_cut(detail['prompt']))}</pre>{table(head, rows)}"
        f'<details><summary>Texts</summary><div class="wide"><table>{texts}</table></div></details>'
    )


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST_TEXT else words[:LONGEST_TEXT] + "…"
