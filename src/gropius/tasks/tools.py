"""Questions to be worked on with a tool: a calculator, or Python in the sandbox. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gropius.envs.calculator import CalculatorFault, calculate
from gropius.envs.tools import Tool, ToolUse, Workbench, result_text
from gropius.errors import DataError, did_you_mean
from gropius.rewards.math import verify
from gropius.sandbox.base import TIERS, Limits, SandboxUnavailable, Tier
from gropius.sandbox.session import ProgramFailed
from gropius.sandbox.tiers import Sandbox, open_sandbox
from gropius.tasks.base import TaskSet, fingerprint, require_range, rows_pair
from gropius.types import Environment, Message, Task

HINT = {
    "calculator": "You may use a calculator: write <calculator>12 * (3 + 4)</calculator> and nothing else in a reply, "
    "and the value comes back. When you know it, reply with the final number only.",
    "python": "You may run Python: write <python>print(2 ** 10)</python> and nothing else in a reply, and what it "
    "prints comes back. When you know it, reply with the final number only.",
}


def calculator(
    *, seed: int = 0, digits: int = 4, terms: int = 3, calls: int = 3, rows: Sequence[int] = (512, 60)
) -> TaskSet:
    """Sums and products of large numbers, with a calculator of a safe grammar (`envs.calculator`).

    digits: of a number (1 to 9). terms: numbers in a question (2 to 8). calls: of the tool (0 to 20). rows: train and
    held-out questions, all different. Set rollout.max_turns to calls + 2. Raises DataError for an option out of range.
    """
    require_range("calculator: digits", digits, 1, 9)
    require_range("calculator: terms", terms, 2, 8)
    wanted, kept_out = rows_pair("calculator", rows)

    def _question(draw: random.Random) -> tuple[str, str, str]:
        pieces = [str(draw.randrange(10 ** (digits - 1), 10**digits))]
        for _ in range(terms - 1):
            pieces += [draw.choice("+-*"), str(draw.randrange(10 ** (digits - 1), 10**digits))]
        text = " ".join(pieces)
        return f"What is {text}?", text, calculate(text)

    plan = _Plan("calculator", "calculator", calls, seed, {"calculator": _calculated})
    return _task_set(plan, _question, wanted, kept_out)


def python_tool(
    *, seed: int = 0, calls: int = 3, rows: Sequence[int] = (512, 60), minimum: str = "landlock", wall_s: float = 5.0
) -> TaskSet:
    """Questions that a short program answers, with Python in the sandbox as the tool.

    calls: of the tool (0 to 20). minimum: the weakest isolation that may be used; see `gropius sandbox`. wall_s: time
    limit of one call. rows: train and held-out questions, all different. Raises DataError for an option out of range.
    """
    wanted, kept_out = rows_pair("python_tool", rows)
    if minimum not in TIERS:
        raise DataError(f'python_tool: minimum = "{minimum}"; {did_you_mean(minimum, TIERS)}')
    tier = next(name for name in TIERS if name == minimum)
    plan = _Plan("python_tool", "python", calls, seed, {"python": lambda code: run_python(code, tier, wall_s)}, minimum)
    return _task_set(plan, _puzzle, wanted, kept_out)


def run_python(code: str, minimum: Tier = "landlock", wall_s: float = 5.0) -> str:
    """What a program prints, in the sandbox; its failure as text for the model.

    Raises RuntimeError (void) when this machine cannot isolate it: the program is never run unprotected.
    """
    try:
        with _sandbox(minimum, wall_s).session("stdin") as session:
            try:
                session.start(code)
                answer = session.ask("")
            except ProgramFailed as problem:
                return f"failed: {problem.reason}"
            printed, status = str(answer.get("out", "")), answer.get("code")
            if status:
                return f"{printed}failed: {_last_line(session.printed_tail) or f'exit code {status}'}"
            return printed.rstrip("\n") or "(nothing was printed)"
    except SandboxUnavailable as problem:
        raise RuntimeError(f"the sandbox cannot be used: {problem}") from problem


@dataclass(frozen=True)
class _Plan:
    name: str
    tag: str
    calls: int
    seed: int
    tools: dict[str, Tool]
    sandbox: str = ""


@lru_cache(maxsize=4)
def _sandbox(minimum: Tier, wall_s: float) -> Sandbox:
    return open_sandbox(minimum, Limits(wall_s=wall_s))


def _calculated(text: str) -> str:
    try:
        return calculate(text)
    except CalculatorFault as fault:
        return f"failed: {fault}"


def _last_line(printed: bytes) -> str:
    lines = printed.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _task_set(
    plan: _Plan, question: Callable[[random.Random], tuple[str, str, str]], wanted: int, kept_out: int
) -> TaskSet:
    require_range(f"{plan.name}: calls", plan.calls, 0, 20)
    draw, seen = random.Random(f"{plan.seed}:{plan.name}"), set[str]()
    tasks: list[Task] = []
    for _ in range(50 * (wanted + kept_out)):
        asked, call, answer = question(draw)
        if asked not in seen:
            seen.add(asked)
            prompt = f"{asked}\n{HINT[plan.tag]}"
            tasks.append(Task(f"{plan.name}:{len(tasks):05d}", prompt, answer, {"call": call}))
        if len(tasks) == wanted + kept_out:
            break
    else:
        raise DataError(f"{plan.name}: only {len(tasks)} different questions exist; ask for fewer rows")
    train, held_out = tuple(tasks[kept_out:]), tuple(tasks[:kept_out])

    def environment(task: Task) -> Environment:
        bench = Workbench(str(task.prompt), plan.tools, lambda reply: verify(reply, task.answer or ""), plan.calls)
        return ToolUse(bench)

    return TaskSet(
        name=plan.name,
        train=train,
        held_out=held_out,
        solution=lambda task: _shown(task, plan),
        environment=environment,
        rewards=("environment",),
        system_prompt=None,
        notes=(f"{plan.name}: {wanted} train and {kept_out} held-out questions, {plan.calls} tool calls each",),
        fingerprint=fingerprint(train, held_out),
        sandbox=plan.sandbox,
        judges_text=True,
        blocking=bool(plan.sandbox),
    )


def _shown(task: Task, plan: _Plan) -> tuple[Message, ...]:
    """A demonstration: the call, its result, the answer; without calls the answer alone."""
    answer: Message = {"role": "assistant", "content": task.answer or ""}
    if not plan.calls:
        return (answer,)
    call: Message = {"role": "assistant", "content": f"<{plan.tag}>{task.metadata['call']}</{plan.tag}>"}
    return (call, {"role": "user", "content": result_text(task.answer or "")}, answer)


def _puzzle(draw: random.Random) -> tuple[str, str, str]:
    """(question, program, answer), the answer computed here without the program."""
    kind = draw.randrange(3)
    if kind == 0:
        base, power = draw.randrange(2, 20), draw.randrange(10, 60)
        digits = str(sum(map(int, str(base**power))))
        question = f"What is the sum of the decimal digits of {base} to the power of {power}?"
        return question, f"print(sum(map(int, str({base} ** {power}))))", digits
    if kind == 1:
        low = draw.randrange(10, 3000)
        high = low + draw.randrange(50, 400)
        program = (
            f"print(sum(n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)) for n in range({low}, {high} + 1)))"
        )
        count = sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(low, high + 1))
        return f"How many prime numbers are there from {low} to {high}, both included?", program, str(count)
    limit, a, b = draw.randrange(200, 5000), draw.randrange(3, 12), draw.randrange(3, 12)
    total = sum(n for n in range(limit) if n % a == 0 or n % b == 0)
    question = f"What is the sum of all whole numbers from 0 to {limit - 1} that are divisible by {a} or by {b}?"
    return question, f"print(sum(n for n in range({limit}) if n % {a} == 0 or n % {b} == 0))", str(total)
