"""`gropius play RECIPE|RUN`: you are the policy; the task, the environment and the reward are the recipe's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Settings, Target, TrustCode
from gropius.cli.output import inert, number, print_text
from gropius.cli.target import find_recipe_of
from gropius.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from gropius.tasks.base import TaskSet
    from gropius.types import EnvironmentStep, Episode, Message, Task, Turn, Verdict

Ask = Callable[[], str]
Tell = Callable[[str], None]


def command(
    target: Target,
    settings: Settings = [],  # noqa: B006
    task: Annotated[int, typer.Option("--task", metavar="N", help="Which held-out task, counted from 0.")] = 0,
    trust_code: TrustCode = False,
) -> None:
    """Answer a task yourself, or play its environment, and see what every part of the reward says."""
    resolved = find_recipe_of(target, settings, trust_code)
    from gropius import build

    tasks = build.tasks(resolved)
    scorer = build.scorer(resolved, tasks)
    pool = tasks.held_out or tasks.train
    if not 0 <= task < len(pool):
        raise UsageError(f"--task {task}: there are {len(pool)} tasks; write 0 to {len(pool) - 1}")
    print_text(*tasks.notes, f"task {pool[task].key}")
    episode = play(pool[task], tasks, _ask, print_text)
    verdict = asyncio.run(scorer.score([episode]))[0]
    print_text(*verdict_lines(verdict, pool[task]))


def play(task: Task, tasks: TaskSet, ask: Ask, tell: Tell) -> Episode:
    """Play one episode: `ask` gives the replies, `tell` shows messages. Without an environment one reply ends it.

    Token ids are empty: nobody sampled. Errors: whatever `ask` raises.
    """
    from gropius.types import Episode

    environment = tasks.environment(task) if tasks.environment else None
    messages: list[Message] = list(environment.start() if environment else task.messages())
    for message in messages:
        tell(f"{message['role']}: {message['content']}")
    turns: list[Turn] = []
    last: EnvironmentStep | None = None
    while True:
        reply = ask()
        turns.append(_turn("model", reply))
        messages.append({"role": "assistant", "content": reply})
        if environment is None:
            break
        last = environment.step(reply)
        for message in last.messages:
            tell(f"{message['role']}: {message['content']}")
        messages += last.messages
        if last.done:
            break
        turns.append(_turn("environment", "\n".join(message["content"] for message in last.messages)))
    return Episode(
        task=task,
        group_id="000000-0000",
        member=0,
        prompt_ids=_no_ids(),
        turns=tuple(turns),
        messages=tuple(messages),
        finish_reason="stop" if environment is None else "environment_end",
        outcome_step=last,
    )


def verdict_lines(verdict: Verdict, task: Task) -> Sequence[str]:
    """What the reward says, part by part, and the gold answer."""
    outcome = verdict.outcome
    lines = [f"reward {number(outcome.value)} ({outcome.status}{_because(outcome.reason)})"]
    lines += [
        f"  {name} {number(part.value)} ({part.status}{_because(part.reason)})" for name, part in verdict.parts.items()
    ]
    if verdict.raw is not None:
        lines.append(f"metric {number(verdict.raw)}")
    if task.answer is not None:
        lines.append(f"the gold answer: {task.answer}")
    return lines


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _ask() -> str:
    try:
        return input(inert("you: "))
    except EOFError as error:
        raise Interrupted("the input ended before the episode did") from error


def _turn(role: Any, text: str) -> Turn:
    from gropius.types import Turn

    return Turn(role, _no_ids(), text)


def _no_ids() -> Any:
    import numpy as np

    return np.zeros(0, np.int64)
