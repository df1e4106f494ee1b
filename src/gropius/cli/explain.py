"""`gropius explain`: the objective on one group of rewards, or on a batch, number by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gropius.cli.options import Json, Settings
from gropius.cli.output import number, print_json, print_table, print_text
from gropius.errors import ObjectiveError, UsageError


def command(
    batch: Annotated[
        Path | None,
        typer.Argument(metavar="[BATCH.json|RUN]", help="A batch of groups (see docs for its keys), or a run folder."),
    ] = None,
    rewards: Annotated[
        str | None, typer.Option("--rewards", metavar="R,R,…", help="One group's rewards, e.g. 1,1,0,0.")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", "--preset", metavar="PRESET", help="The preset to start from.")
    ] = "grpo",
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Of a run: which step; the last.")] = None,
    settings: Settings = [],  # noqa: B006  (typer copies the default)
    as_json: Json = False,
) -> None:
    """Replay a group step by step (--rewards), or evaluate the objective on a batch or a run's step in float64."""
    from gropius.objective.explain import explain, explain_rewards

    preset, overrides = _overrides(objective, settings)
    if (batch is None) == (rewards is None):
        raise UsageError("give either --rewards 1,1,0,0, or a BATCH.json, or a run folder")
    if step is not None and (batch is None or not batch.is_dir()):
        raise UsageError("--step N goes with a run folder; leave it out")
    if rewards is not None:
        report = explain_rewards(parse_rewards(rewards), preset, overrides)
        print_json(report) if as_json else _print_rewards(report)
    elif batch is not None and batch.is_dir():
        if settings or objective != "grpo":
            raise UsageError("a run is explained by the objective it was trained with; leave --objective and --set out")
        report = explain_run(batch, step)
        print_json(report) if as_json else _print_run(report)
    elif batch is not None:
        report = explain(_read(batch), preset, overrides)
        print_json(report) if as_json else _print_batch(report)


def explain_run(run: Path, step: int | None) -> dict[str, Any]:
    """A recorded step taken apart by the objective it was trained with: the logged loss, and the one recomputed.

    `updates` holds one report for every optimiser step of the first pass; `loss` is their mean.
    Errors: RunFolderError for a folder that is no run, or a step that was not recorded.
    """
    from gropius.cli.target import of_run
    from gropius.errors import RunFolderError
    from gropius.objective.explain import explain
    from gropius.records.reader import RunReader
    from gropius.records.replay import batches, in_force

    reader = RunReader(run)
    resolved, steps = of_run(reader), reader.steps()
    chosen = steps[-1] if step is None and steps else step
    if chosen not in steps or chosen is None:
        there = f"recorded are {steps[0]} to {steps[-1]}" if steps else "no step was recorded"
        raise RunFolderError(f"{run}: no rollouts of step {step}; {there}")
    records = reader.rollouts(chosen)
    if not records:
        raise RunFolderError("; ".join(reader.problems) or f"{run}: step {chosen} holds no response")
    weights = None
    if resolved.objective.advantage.combine == "normalise_then_sum":
        weights = {name: 1.0 for record in records for name in record.parts}
        weights |= {part.name.rpartition(":")[2]: part.weight for part in resolved.reward}
    row = reader.metrics_by_step().get(chosen, {})
    objective = in_force(resolved.objective, row.get("entropy_bonus"))
    reports = [explain(batch, objective) for batch in batches(records, part_weights=weights)]
    logged = row.get("loss")
    loss = sum(report["loss"] for report in reports) / len(reports) if reports else None
    return {"run": str(run), "step": chosen, "logged_loss": logged, "loss": loss, "updates": reports}


def _print_run(report: dict[str, Any]) -> None:
    print_text(f"{report['run']}, step {report['step']}")
    print_text(f"logged loss {number(report['logged_loss'], 10)}, recomputed {number(report['loss'], 10)}", "")
    for update in report["updates"]:
        _print_batch(update)


def parse_rewards(text: str) -> list[float]:
    """Numbers between commas. Errors: UsageError naming the one that is none.

    >>> parse_rewards("1, 1,0,0.5")
    [1.0, 1.0, 0.0, 0.5]
    """
    rewards = []
    for position, word in enumerate(text.split(",") if text.strip() else [], start=1):
        try:
            rewards.append(float(word))
        except ValueError:
            raise UsageError(
                f"--rewards: number {position} is {word.strip()!r}; write numbers: --rewards 1,1,0,0"
            ) from None
    return rewards


def _overrides(preset: str, settings: list[str]) -> tuple[str, dict[str, Any]]:
    from gropius.recipe.load import dotted, parse_setting

    overrides: dict[str, Any] = {}
    for setting in settings:
        path, value = parse_setting(setting)
        if path[0] != "objective":
            raise UsageError(f"--set {dotted(path)}: explain knows only the objective; write --set objective.…")
        overrides[dotted(path[1:])] = value
    chosen = overrides.pop("preset", preset)
    if not isinstance(chosen, str):
        raise ObjectiveError(f"objective.preset is a name, got {chosen!r}")
    return chosen, overrides


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: this is not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: this is not JSON text in UTF-8: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different. Errors: ObjectiveError naming one that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ObjectiveError(f"the key {twice!r} stands twice in one object; write it once")
    return found


def _print_rewards(report: dict[str, Any]) -> None:
    print_text(*report["formula"].splitlines(), "")
    count = len(report["advantages"])
    rows = [(s["name"], s["definition"], *(number(v) for v in s["values"])) for s in report["steps"]]
    print_table(("step", "definition", *(str(i + 1) for i in range(count))), rows, left=2)
    print_text("", f"mean {number(report['mean'])}, std {number(report['std'])}, group: {report['state']}")
    print_text(*(f"note: {note}" for note in report["notes"]))


def _print_batch(report: dict[str, Any]) -> None:
    print_text(*report["formula"].splitlines(), "")
    denominator = ", ".join(f"{number(value)} {name}" for name, value in report["denominator"].items())
    print_text(f"loss {number(report['loss'], 10)}    denominator: {denominator}")
    print_text(*(f"{name} {number(value, 6)}" for name, value in report["metrics"].items()))
    for group in report["groups"]:
        print_text(
            "", f"group {group['id']}: {group['state']}, mean {number(group['mean'])}, std {number(group['std'])}"
        )
        responses = group["responses"]
        if all(response["skipped"] for response in responses):
            tokens = sum(len(response["tokens"]) for response in responses)
            print_text(f"all {len(responses)} responses are skipped: each of their {tokens} tokens adds exactly 0")
            continue
        rows = [row for index, response in enumerate(responses) for row in _token_rows(index, response)]
        print_table(("response", "token", "advantage", *_TOKEN_COLUMNS), rows)
    print_text(*(f"note: {note}" for note in report["notes"]))


_TOKEN_COLUMNS = ("weight", "ratio", "clipped", "surrogate", "kl", "contribution", "gradient")


def _token_rows(index: int, response: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row a token; a response that is skipped, so that all is 0, or has no token gets one row for itself."""
    advantage = response["advantage"]
    tokens = response["tokens"]
    if not tokens:
        return [(str(index), "–", number(advantage), *("–" for _ in _TOKEN_COLUMNS))]
    if response["skipped"]:
        one = next((value for value in advantage if value), 0.0) if isinstance(advantage, list) else advantage
        return [(f"{index} skipped", f"0-{len(tokens) - 1}", number(one), *("0" for _ in _TOKEN_COLUMNS))]
    rows = []
    own = 0
    for position, token in enumerate(tokens):
        masked = token.get("masked", False)
        value = advantage[own] if isinstance(advantage, list) and not masked else advantage
        own += not masked
        cells = ["masked" if masked and name == "weight" else _cell(token.get(name)) for name in _TOKEN_COLUMNS]
        rows.append((str(index), str(position), "–" if masked else number(value), *cells))
    return rows


def _cell(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else number(value)
