"""`gropius show RUN [--group ID]`: the groups of a step, or one group with its siblings, in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Json
from gropius.cli.output import number, print_json, print_table, print_text

if TYPE_CHECKING:
    from gropius.viewer.store import RunStore


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a log of TRL, verl or OpenRLHF.")],
    group: Annotated[str | None, typer.Option("--group", metavar="ID", help="One group, e.g. 000012-0003.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Which step; the last one recorded.")] = None,
    as_json: Json = False,
) -> None:
    """Print one group with its siblings' rewards, advantages and texts; without --group, the groups of a step."""
    from gropius.viewer.foreign import opened

    with opened(run) as store:
        if group is None:
            _groups(store, step, as_json)
            return
        detail = _detail(store, group, step)
    if as_json:
        print_json(detail)
    else:
        _print_group(detail)


def _groups(store: RunStore, step: int | None, as_json: bool) -> None:
    from gropius.errors import RunFolderError
    from gropius.viewer.groups import ROW_FIELDS
    from gropius.viewer.index import step_groups
    from gropius.viewer.store import strict

    steps = store.steps()
    chosen = step if step is not None else (steps[-1] if steps else None)
    table = step_groups(store, chosen) if chosen in steps and chosen is not None else None
    if table is None:
        there = f"recorded are {steps[0]} to {steps[-1]}" if steps else "no step was recorded"
        said = "".join(f"; {problem}" for problem in store.problems)
        raise RunFolderError(f"{store.reader.folder}: no responses of step {chosen}; {there}{said}")
    rows = strict(table.select(ROW_FIELDS).to_pylist())
    if as_json:
        print_json({"step": chosen, "groups": rows, "problems": store.problems})
        return
    print_text(f"step {chosen}: {len(rows)} groups", "")
    print_table(
        ("group", "task", "state", "siblings", "mean", "std", "longest", "duplicates"),
        [
            (r["group_id"], r["task_key"], r["state"] or "not trained", number(r["size"]), number(r["mean"]),
             number(r["std"]), number(r["longest"]), number(r["duplicates"]))
            for r in rows
        ],
        left=3,
    )  # fmt: skip


def _detail(store: RunStore, group: str, step: int | None) -> dict[str, Any]:
    from gropius.errors import RunFolderError
    from gropius.viewer.groups import group_detail
    from gropius.viewer.index import RunIndex
    from gropius.viewer.report import find_group

    if step is None and group[:6].isdecimal():
        step = int(group[:6])  # ids are made so; another folder's may not be, and are looked for below
    detail = group_detail(store, step, group) if step is not None else None
    if detail is None:
        index = RunIndex(store, None)
        index.wait()
        detail = find_group(store, index, group)
    if detail is None:
        raise RunFolderError(f"{store.reader.folder}: no group {group}")
    return detail


def _print_group(detail: dict[str, Any]) -> None:
    replay = detail["replay"] or {}
    state = detail["state"].replace("_", " ") or "not trained"
    print_text(
        f"group {detail['group_id']}, step {detail['step']}, task {detail['task_key']}: {state}",
        f"mean {number(replay.get('mean'))}, std {number(replay.get('std'))}",
        _how(replay),
        "",
        detail["prompt"],
        "",
    )
    responses = detail["responses"] + ([detail["greedy"]] if detail["greedy"] else [])
    names = list(dict.fromkeys(part["name"] for r in responses for part in r["parts"]))
    print_table(
        ("sibling", "status", "ended", *names, "reward", "baseline", "centred", "scale", "advantage", "tokens", "loss"),
        [
            (_name(r), r["status"] or "unscored", r["finish_reason"], *_parts(r, names), number(r["reward"]),
             *(_of(replay, name, i) for name in ("baseline", "centred", "scale")), number(r["advantage"]),
             number(r["tokens"]), number(r["contribution"], 3))
            for i, r in enumerate(responses)
        ],
        left=3,
    )  # fmt: skip
    for response in responses:
        reasons = [f"{p['name']}: {p['reason']}" for p in response["parts"] if p["reason"]]
        whole = response["reason"]
        if whole and not any(p["reason"] and whole.endswith(p["reason"]) for p in response["parts"]):
            reasons.append(whole)
        flags = [word for word in ("duplicate", "skipped") if response[word]]
        notes = "; ".join([*reasons, *flags])
        print_text("", f"── {_name(response)}  {number(response['advantage'])}{'  ' + notes if notes else ''}")
        print_text(response["text"])


def _how(replay: dict[str, Any]) -> str:
    """The advantage's definition, and whether it gives the recorded ones again."""
    if not replay:
        return "how the advantages came about is not recorded: the folder names no objective"
    if "reason" in replay:
        return f"the advantages cannot be made again from this group alone: {replay['reason']}"
    words = f"advantage = {replay['formula']}"
    if replay["agrees"]:
        return words
    return words + "; the recorded ones differ from those of this group alone: the objective looks at the whole batch"


def _parts(response: dict[str, Any], names: list[str]) -> list[str]:
    found = {part["name"]: part for part in response["parts"]}
    return [number(found[n]["value"]) if n in found and found[n]["status"] != "void" else number(None) for n in names]


def _name(response: dict[str, Any]) -> str:
    return "greedy" if response["member"] < 0 else f"#{response['member']}"


def _of(replay: dict[str, Any], name: str, i: int) -> str:
    values = replay.get(name) or []
    return number(values[i]) if i < len(values) else number(None)
