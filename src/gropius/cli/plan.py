"""`gropius plan [SOURCE]`: group size against number of prompts, and what a run costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Json
from gropius.cli.output import number, print_json, print_table, print_text, say
from gropius.errors import UsageError

if TYPE_CHECKING:
    from gropius.plan.cost import CostReport, ModelShape
    from gropius.plan.machines import Machine
    from gropius.plan.question import Question
    from gropius.plan.split import Phase, Plan

BAR = 40


def command(
    source: Annotated[
        Path | None, typer.Argument(metavar="[SOURCE]", help="A run folder, or a JSON file of solved counts.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="N", help="Of a step: 512 (responses) or 65536tokens.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FOLDER", help="Cost: a model's folder or its config.json.")
    ] = None,
    machine: Annotated[
        str,
        typer.Option("--machine", metavar="NAME", help="Cost: h100, 8xh100, …, probe, or run (as SOURCE measured)."),
    ] = "probe",
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any key of the plan, e.g. --set group_sizes=[4,8].")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Weigh group size against prompts from measured pass rates; with --model, count time and memory of a run."""
    if source is None and model is None:
        raise UsageError("give a run folder or a file of counts, or --model for the cost of a run, or both")
    report: dict[str, Any] = {}
    asked = _question(settings)
    split, live, tokens = (8, 8), 1.0, 0.0
    if source is not None:
        plan, phases, notes = _split(source, budget, asked, any(s.startswith("objective=") for s in settings))
        split, live = (plan.row.prompts, plan.row.group_size), 1 - plan.row.dead.value
        tokens = plan.budget.response_tokens
        report["plan"] = {**plan.as_dict(), "schedule": [vars(p) for p in phases], "notes": notes}
        if not as_json:
            _print_plan(plan, phases, notes)
    elif budget is not None:
        raise UsageError("--budget splits measured pass rates; give a run folder or a file of counts as well")
    if model is not None:
        costs = _cost(model, machine, (asked, split, tokens, live), source)
        report["cost"] = costs.as_dict()
        if not as_json:
            _print_cost(costs)
    if as_json:
        print_json(report)


def _question(settings: list[str]) -> Question:
    from gropius.plan.question import question
    from gropius.recipe.load import dotted, parse_setting

    return question({dotted(path): value for path, value in map(parse_setting, settings)})


def _split(
    source: Path, budget: str | None, asked: Question, chosen: bool
) -> tuple[Plan, tuple[Phase, ...], list[str]]:
    """The plan, its schedule, and notes. chosen: the objective was asked for, so that of the run does not count."""
    from gropius.objective.presets import resolve
    from gropius.plan.counts import read_counts
    from gropius.plan.question import budget as read_budget
    from gropius.plan.question import scale_of
    from gropius.plan.recorded import as_recorded, from_run
    from gropius.plan.split import plan_split, schedule

    if source.suffix == ".toml" or not source.exists():
        raise UsageError(
            f"{source}: no run folder and no file of counts. To measure a recipe's pass rates, draw one step and plan "
            f"from its run: gropius train {source.stem} --set train.steps=1"
        )
    known: dict[str, Any] = {}
    notes: list[str] = []
    if source.is_dir():
        measured, notes = from_run(source)
        known = dict(as_recorded(source))
    else:
        measured = read_counts(source)
    written = known.pop("objective", {})
    fields = {k: x for k, x in written.items() if k != "preset"}
    objective = resolve(asked.objective) if chosen or not written else resolve(written.get("preset"), fields)
    scale, note = scale_of(objective)
    notes += [note] if note else []
    spend = read_budget(budget or str(known.get("budget", 512)), asked, measured.response_tokens)
    plan = plan_split(measured, spend, asked.group_sizes, scale, asked.seed)
    return plan, schedule(measured, spend, asked.group_sizes, seed=asked.seed), notes


def _cost(
    model: Path, machine: str, known: tuple[Question, tuple[int, int], float, float], source: Path | None
) -> CostReport:
    from gropius.plan.cost import cost
    from gropius.plan.question import workload

    asked, split, tokens, live = known
    load = workload(asked, split, tokens, live)
    shape = read_shape(model)
    if machine == "run":
        return cost(shape, load, _recorded_machine(source, shape, load.prompt_tokens))
    return cost(shape, load, _machine(machine, shape, load.rows or min(load.responses, 64)))


def _recorded_machine(source: Path | None, shape: ModelShape, prompt_tokens: float) -> Machine:
    from gropius.plan.machines import Machine
    from gropius.plan.recorded import calibrated, timing

    if source is None or not source.is_dir():
        raise UsageError("--machine run takes its speed from a run folder as SOURCE")
    unit = Machine("as recorded", 1e12, 50e9, float("inf"), source="")
    return calibrated(shape, timing(source, prompt_tokens), unit)


def read_shape(path: Path) -> ModelShape:
    """The shape of the model in a folder or a config.json. Errors: UsageError naming the file and the key."""
    from gropius.plan.cost import shape_of

    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; --model takes a model's folder") from error
    except ValueError as error:
        raise UsageError(f"{file}: this is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file}: holds no table of a model's shape")
    return shape_of(config.get("text_config", config), str(file))


def _machine(name: str, shape: ModelShape, rows: int) -> Machine:
    from gropius.plan.machines import machine
    from gropius.plan.probe import probe

    if name == "probe":
        say("measuring this machine for ten seconds")
        return probe(shape, rows)
    count, times, device = name.partition("x")
    return machine(device, int(count)) if times and count.isdigit() else machine(name)


def _print_plan(plan: Plan, phases: tuple[Phase, ...], notes: list[str]) -> None:
    rate = plan.pass_rate
    print_text(
        f"{plan.fit.prompts} prompts measured, mean pass rate {plan.fit.rate:.3f}; fitted population "
        f"{rate.value:.3f} ({rate.low:.3f} to {rate.high:.3f}), {plan.fit.components} Beta component(s)",
        f"budget: {plan.budget.responses} responses a step; advantage scale: {plan.scale}",
        "",
    )
    header = ("group size", "prompts", "dead", "95 %", "failed", "solved", "live prompts", "95 %", "signal",
              "SNR/response", "refill x", "grow live")  # fmt: skip
    rows = []
    for row in plan.rows:
        mark = " <" if row.group_size == plan.recommended else ""
        rows.append((
            f"{row.group_size}{mark}", str(row.prompts), f"{row.dead.value:.1%}",
            f"{row.dead.low:.0%}-{row.dead.high:.0%}",
            f"{row.all_failed.value:.1%}", f"{row.all_solved.value:.1%}", f"{row.live_prompts.value:.1f}",
            f"{row.live_prompts.low:.1f}-{row.live_prompts.high:.1f}", number(row.signal.value, 3),
            f"{row.efficiency:.0%}", number(row.refill_factor.value, 3), f"{row.grow_live:.0%}",
        ))  # fmt: skip
    print_table(header, rows)
    print_text("", *bars(plan), "", f"take {plan.row.prompts} prompts x {plan.recommended}:")
    print_text(*(f"  {reason}" for reason in plan.reasons))
    if len(phases) > 1:
        print_text("", "schedule from the trend of pass rates:")
        for phase in phases:
            origin = "measured" if phase.measured else "extrapolated"
            print_text(
                f"  from step {phase.step}: {phase.prompts} prompts x {phase.group_size} "
                f"(pass rate {phase.pass_rate:.2f}, {origin})"
            )
    print_text(*(f"note: {note}" for note in notes))


def bars(plan: Plan) -> list[str]:
    """One bar a group size: █ live, ▒ all-solved, ░ all-failed groups."""
    out = ["█ live   ▒ all-solved   ░ all-failed"]
    for row in plan.rows:
        failed, solved = round(BAR * row.all_failed.value), round(BAR * row.all_solved.value)
        live = max(BAR - failed - solved, 0)
        out.append(f"{row.group_size:>4} {'█' * live}{'▒' * solved}{'░' * failed}")
    return out


def _print_cost(report: CostReport) -> None:
    print_text("", "cost of a step")
    rows = [(p.name, f"{p.tokens:,.0f}", f"{p.flops / 1e12:,.3g}", f"{p.time_s:,.3g}") for p in report.phases]
    print_table(("phase", "tokens", "TFLOP", "seconds"), rows)
    memory = [(name, f"{value / 1e9:,.3g}") for name, value in report.memory_bytes.items()]
    print_text("", f"step {report.step_s:,.3g} s, run {report.run_s / 3600:,.3g} h, {report.tokens:,.0f} tokens", "")
    print_table(("memory of one device", "GB"), [*memory, ("peak", f"{report.peak_bytes / 1e9:,.3g}")])
    critic = report.critic
    print_text(
        "it fits" if report.fits else "IT DOES NOT FIT",
        f"a critic would add {critic['memory_bytes'] / 1e9:,.3g} GB and {critic['time_s']:,.3g} s "
        f"({critic['time_share']:.0%}) a step",
        *(f"assumed: {text}" for text in report.assumptions),
    )
