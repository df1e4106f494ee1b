"""`gropius plan [SOURCE] [--probe N]`: group size against number of prompts, and what a run costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli import pass_rates
from gropius.cli.options import Json, TrustCode
from gropius.cli.output import number, print_json, print_table, print_text, say
from gropius.errors import UsageError

if TYPE_CHECKING:
    from gropius.plan.cost import CostReport, ModelShape, Workload
    from gropius.plan.machines import Machine
    from gropius.plan.question import Question
    from gropius.plan.split import Phase, Plan

BAR = 40


def command(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[SOURCE]", help="A run folder, a JSON file of solved counts, or a recipe to probe."),
    ] = None,
    probe: Annotated[
        int | None,
        typer.Option("--probe", min=2, metavar="N", help="Draw N groups of a recipe's own tasks and plan from them."),
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
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Simulate layouts of the machine's devices; SOURCE: a run, a recipe, or none."),
    ] = False,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the plan, e.g. group_sizes=[4,8]; of a recipe, with its table.",
        ),
    ] = [],  # noqa: B006
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Weigh group size against prompts from measured pass rates; with --model, count time and memory of a run; with
    --cluster, simulate how many devices are best divided.
    """
    if cluster:
        if probe is not None or budget is not None:
            raise UsageError("--cluster simulates a step as SOURCE describes it; leave --probe and --budget out")
        _simulate(source, model, machine, settings, as_json)
        return
    if source is None and model is None:
        raise UsageError(
            "give a run folder, a file of counts or a recipe (gropius plan RECIPE --probe 64), or --model for the cost "
            "of a run, or both"
        )
    report: dict[str, Any] = {}
    own, of_recipe = pass_rates.divided(settings)
    asked = _question(own)
    split, live, tokens = (8, 8), 1.0, 0.0
    if source is not None:
        measured = pass_rates.measure(source, probe, of_recipe, trust_code)
        plan, phases = _split(measured, budget, asked, any(s.startswith("objective=") for s in own))
        notes = list(measured.notes)
        split, live = (plan.row.prompts, plan.row.group_size), 1 - plan.row.dead.value
        tokens = plan.budget.response_tokens
        report["plan"] = {**plan.as_dict(), "schedule": [p.as_dict() for p in phases], "notes": notes}
        if not as_json:
            _print_plan(plan, phases, notes)
    elif probe is not None:
        raise UsageError("--probe draws the tasks of a recipe; name one: gropius plan RECIPE --probe 64")
    elif budget is not None:
        raise UsageError("--budget splits measured pass rates; give a run folder or a file of counts as well")
    if model is not None:
        costs = _cost(model, machine, (asked, split, tokens, live), source)
        report["cost"] = costs.as_dict()
        if not as_json:
            print_cost(costs)
    if as_json:
        print_json(report)


def _simulate(source: Path | None, model: Path | None, machine: str, settings: list[str], as_json: bool) -> None:
    from gropius.cli.plan_cluster import simulated

    layouts = simulated(source, model, machine, settings, as_json)
    if as_json:
        print_json({"cluster": layouts})


def _question(settings: list[str]) -> Question:
    from gropius.plan.question import question
    from gropius.recipe.load import dotted, parse_setting

    return question({dotted(path): value for path, value in map(parse_setting, settings)})


def _split(
    measured: pass_rates.Measured, budget: str | None, asked: Question, chosen: bool
) -> tuple[Plan, tuple[Phase, ...]]:
    """The plan and its schedule. chosen: the objective was asked for, so that of the run does not count."""
    from gropius.objective.presets import resolve
    from gropius.plan.question import budget as read_budget
    from gropius.plan.question import scale_of
    from gropius.plan.split import plan_split, schedule

    written = measured.objective
    fields = {k: x for k, x in written.items() if k != "preset"}
    objective = resolve(asked.objective) if chosen or not written else resolve(written.get("preset"), fields)
    scale, note = scale_of(objective)
    measured.notes.extend([note] if note else [])
    counts = measured.counts
    spend = read_budget(budget or str(measured.budget or 512), asked, counts.response_tokens)
    plan = plan_split(counts, spend, asked.group_sizes, scale, asked.seed)
    return plan, schedule(counts, spend, asked.group_sizes, seed=asked.seed)


def _cost(
    model: Path, machine: str, known: tuple[Question, tuple[int, int], float, float], source: Path | None
) -> CostReport:
    from dataclasses import replace

    from gropius.plan.cost import cost
    from gropius.plan.question import workload

    asked, split, tokens, live = known
    load = workload(asked, split, tokens, live)
    shape = read_shape(model)
    if machine == "run":
        one, spread = recorded_machine(source, shape, load.prompt_tokens)
        return cost(shape, replace(load, length_spread=max(asked.length_spread, spread)), one)
    return cost(shape, load, named_machine(machine, model, load))


def recorded_machine(source: Path | None, shape: ModelShape, prompt_tokens: float) -> tuple[Machine, float]:
    """The machine on which a recorded run of this model took the time that it took, and longest over mean length."""
    from gropius.plan.machines import Machine
    from gropius.plan.recorded import calibrated, timing

    if source is None or not source.is_dir():
        raise UsageError("--machine run takes its speed from a run folder as SOURCE")
    unit = Machine("as recorded", 1e12, 50e9, float("inf"), source="")
    measured = timing(source, prompt_tokens)
    return calibrated(shape, measured, unit), measured.load.length_spread


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


def named_machine(name: str, model: Path, load: Workload) -> Machine:
    """A machine by name (h100, 8xh100), or this one, measured (probe)."""
    from gropius.plan.machines import machine

    if name == "probe":
        from gropius.train.probe import measured

        say("measuring this machine with the model's own decode steps and updates, about ten seconds")
        return measured(model, load)
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
        _print_schedule(phases)
    print_text(*(f"note: {note}" for note in notes))


def _print_schedule(phases: tuple[Phase, ...]) -> None:
    """A table of the windows with a bar of the pass rate, and in words when to change the group size."""
    from gropius.plan.split import changes

    print_text("", "the trend of pass rates, and the group size for it:")
    rows = [
        (f"{p.step}", f"{'█' * round(BAR * p.pass_rate.value / 2)}".ljust(BAR // 2, "·"),
         "measured" if p.measured else "extrapolated", f"{p.pass_rate.value:.2f}",
         f"{p.pass_rate.low:.2f}-{p.pass_rate.high:.2f}", str(p.group_size), str(p.prompts))
        for p in phases
    ]  # fmt: skip
    print_table(("from step", "pass rate", "", "", "95 %", "group size", "prompts"), rows, left=3)
    told = changes(phases)
    if len(told) == 1:
        print_text(f"keep {told[0].group_size} siblings throughout")
    else:
        print_text(*(f"from step {p.step}: {p.prompts} prompts x {p.group_size}" for p in told))


def bars(plan: Plan) -> list[str]:
    """One bar a group size: █ live, ▒ all-solved, ░ all-failed groups."""
    out = ["█ live   ▒ all-solved   ░ all-failed"]
    for row in plan.rows:
        failed, solved = round(BAR * row.all_failed.value), round(BAR * row.all_solved.value)
        live = max(BAR - failed - solved, 0)
        out.append(f"{row.group_size:>4} {'█' * live}{'▒' * solved}{'░' * failed}")
    return out


def print_cost(report: CostReport) -> None:
    """Phases, seconds, bytes, and what a critic would add."""
    print_text("", "cost of a step")
    rows = [(p.name, f"{p.tokens:,.0f}", f"{p.flops / 1e12:,.3g}", f"{p.time_s:,.3g}") for p in report.phases]
    print_table(("phase", "tokens", "TFLOP", "seconds"), rows)
    memory = [(name, f"{value / 1e9:,.3g}") for name, value in report.memory_bytes.items()]
    print_text("", f"step {report.step_s:,.3g} s, run {report.run_s / 3600:,.3g} h, {report.tokens:,.0f} tokens", "")
    print_table(("memory of one device", "GB"), [*memory, ("peak", f"{report.peak_bytes / 1e9:,.3g}")])
    from gropius.plan.critic import kept_share

    critic = report.critic
    print_text(
        "it fits" if report.fits else "IT DOES NOT FIT",
        f"a critic would add {critic['memory_bytes'] / 1e9:,.3g} GB and {critic['time_s']:,.3g} s "
        f"({critic['time_share']:.0%}) a step; without it {kept_share(report):.0%} of weights, gradients and moments "
        "stay",
        *(f"assumed: {text}" for text in report.assumptions),
    )
