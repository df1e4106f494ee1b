"""`gropius plan [SOURCE] --cluster`: layouts of devices, simulated and compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gropius.cli.output import print_table, print_text, say
from gropius.errors import UsageError

if TYPE_CHECKING:
    from gropius.plan.cluster_question import ClusterQuestion, Known
    from gropius.plan.cost import ModelShape, Workload
    from gropius.plan.layouts import Comparison
    from gropius.plan.machines import Machine

KINDS = "a run folder, a recipe, or nothing (gropius plan --cluster --model FOLDER --machine 64xh100)"


def simulated(
    source: Path | None, model: Path | None, machine: str, settings: list[str], quiet: bool
) -> dict[str, Any]:
    """Play the layouts; printed unless `quiet`. Errors: UsageError saying what to give instead."""
    from gropius.cli.plan import read_shape
    from gropius.plan import cluster_question as ask
    from gropius.plan.cluster import least_trainer
    from gropius.plan.layouts import compare, layouts

    if model is None:
        raise UsageError("--cluster simulates a model; name its folder or its config.json: --model FOLDER")
    own = [text for text in settings if "." not in text.partition("=")[0]]
    asked, shape = _asked(own), read_shape(model)
    known = _known(source, [text for text in settings if text not in own])
    step = ask.job(asked, known)
    load = ask.workload(asked, step)
    count, one = _device(machine, asked, (source, model), shape, load)
    made = ask.cluster(asked, shape, load, one)
    kinds = layouts(count, made.engine.devices, least_trainer(shape, one), asked.staleness, asked.late)
    found = compare(made, step, kinds, say)
    notes = (*ask.said(one, made, made.transfer), f"lengths: {_lengths(step.lengths)}")
    if not quiet:
        title = f"{count} devices, {step.prompts} prompts x {step.group_size} a step, {step.steps} steps played"
        _print(title, found, notes)
    return {
        "devices": count, "asked": dataclasses.asdict(asked), "job": {**vars(step), "lengths": _lengths(step.lengths)},
        "engine": vars(made.engine), "trainer": vars(made.trainer), "best": found.best.as_dict(),
        "rows": [row.as_dict() for row in found.rows], "tried": [row.as_dict() for row in found.tried],
        "notes": list(notes),
    }  # fmt: skip


def _asked(settings: list[str]) -> ClusterQuestion:
    from gropius.plan.cluster_question import ClusterQuestion
    from gropius.plan.question import typed
    from gropius.recipe.load import dotted, parse_setting

    known = {f.name: f.default for f in dataclasses.fields(ClusterQuestion)}
    asked = ClusterQuestion(**typed({dotted(path): value for path, value in map(parse_setting, settings)}, known))
    if asked.late not in ("wait", "drop"):
        raise UsageError(f'--set late: "{asked.late}" is neither "wait" nor "drop"')
    return asked


def _known(source: Path | None, of_recipe: list[str]) -> Known:
    from gropius.plan.cluster_question import Known

    if source is None:
        return Known()
    if source.is_dir():
        from gropius.plan.recorded import response_lengths
        from gropius.records.reader import RunReader

        rollout = RunReader(source).resolved().get("rollout", {})
        sizes = {name: rollout.get(name, 0) for name in ("prompts", "group_size", "max_tokens")}
        return Known(**sizes, lengths=response_lengths(source))
    if source.suffix == ".json":
        raise UsageError(f"{source}: a file of counts tells nothing about a cluster; give {KINDS}")
    from gropius.recipe import resolve

    drawn = resolve(str(source), of_recipe).rollout
    return Known(drawn.prompts, drawn.group_size, drawn.max_episode_tokens)


def _device(
    machine: str, asked: ClusterQuestion, paths: tuple[Path | None, Path], shape: ModelShape, load: Workload
) -> tuple[int, Machine]:
    """How many devices, and one of them."""
    from gropius.cli import plan
    from gropius.plan.cluster_question import device

    source, model = paths
    times, _, name = machine.partition("x") if machine[:1].isdigit() else ("", "", machine)
    if times and not times.isdigit():
        raise UsageError(f"--machine {machine}: write how many and of what, e.g. 64xh100")
    if asked.tflops and name == "probe":
        one = device(asked, None)
    elif name == "run":
        one = device(asked, plan.recorded_machine(source, shape, load.prompt_tokens)[0])
    else:
        one = device(asked, plan.named_machine(name, model, load))
    count = asked.devices or int(times or 1)
    if not 1 <= count <= 65536:
        raise UsageError(f"{count} devices: write 1 to 65536")
    return count, one


def _lengths(lengths: Any) -> str:
    values = {name: value for name, value in vars(lengths).items() if name != "tokens" or isinstance(value, int)}
    told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    kind = type(lengths).__name__.lower()
    return f"{kind}, mean {lengths.mean:,.4g} tokens" + (
        f" ({told})" if told else f", of {len(lengths.tokens)} responses"
    )


def _print(title: str, found: Comparison, notes: tuple[str, ...]) -> None:
    header = ("layout", "engines", "trainer", "step s", "responses/s", "engines busy", "rows", "trainer busy",
              "hand-over", "groups' age", "tokens' age", "held back by")  # fmt: skip
    rows = []
    for row in found.rows:
        o, layout = row.outcome, row.layout
        age = sum(versions * share for versions, share in o.staleness.items())
        rows.append((
            layout.name + (" <" if row is found.best else ""),
            "shared" if layout.colocated else str(layout.engine_devices), str(layout.trainer_devices),
            f"{o.step_s:,.4g}", f"{o.responses_s:,.3g}", f"{o.engine_busy:.0%}", f"{o.engine_fill:.0%}",
            f"{o.trainer_busy:.0%}", f"{o.transfer:.1%}", f"{age:.2f} (≤ {max(o.staleness)})",
            f"{o.token_staleness:.2f}", row.held_back_by,
        ))  # fmt: skip
    print_text(title, "")
    print_table(header, rows)
    best = found.best
    gains = ", ".join(f"{name} {max(gain, 0.0):.0%}" for name, gain in best.gains)
    print_text(
        "", f"fastest: {best.layout.name}, {best.outcome.step_s:,.4g} s a step",
        f"  what would be saved by even lengths, twice the devices for trainer or engines, a free hand-over: {gains}",
        *(f"assumed: {note}" for note in notes),
    )  # fmt: skip
    slower = [row for row in found.rows if row.layout.staleness == 0]
    if best.layout.staleness and slower:
        on_policy = min(slower, key=lambda row: row.outcome.step_s)
        factor = on_policy.outcome.step_s / best.outcome.step_s
        print_text(
            f"note: {factor:.2f} x as fast as the fastest synchronous one ({on_policy.layout.name}); its responses are "
            "older, which has to be corrected and may cost learning"
        )
