"""`gropius play RECIPE|RUN`: you are the policy; the task, the environment and the reward are the recipe's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Settings, Target, TrustCode
from gropius.cli.output import inert, number, print_text
from gropius.cli.target import Found, find
from gropius.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from gropius.rewards.base import Scorer
    from gropius.tasks.base import TaskSet
    from gropius.types import EnvironmentStep, Episode, Message, Task, Turn, Verdict

Ask = Callable[[], str]
Tell = Callable[[str], None]


def command(
    target: Target,
    settings: Settings = [],  # noqa: B006
    task: Annotated[int, typer.Option("--task", metavar="N", help="Which held-out task, counted from 0.")] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Let the model answer: a run's last checkpoint.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Answer a task yourself, or play its environment, and see what every part of the reward says."""
    import asyncio

    from gropius import build

    found = find(target, settings, trust_code, model=watch)
    tasks = build.tasks(found.resolved)
    scorer = build.scorer(found.resolved, tasks)
    pool = tasks.held_out or tasks.train
    if not 0 <= task < len(pool):
        raise UsageError(f"--task {task}: there are {len(pool)} tasks; write 0 to {len(pool) - 1}")
    print_text(*tasks.notes, f"task {pool[task].key}")
    if watch:
        episode = watched(pool[task], tasks, scorer, found)
        print_text(*(f"{message['role']}: {message['content']}" for message in episode.messages))
        print_text(f"{len(episode.response_ids)} tokens, finished by {episode.finish_reason}")
        verdict = episode.verdict
    else:
        episode = play(pool[task], tasks, _ask, print_text)
        verdict = asyncio.run(scorer.score([episode]))[0]
    if verdict is not None:
        print_text(*verdict_lines(verdict, pool[task]))


def watched(task: Task, tasks: TaskSet, scorer: Scorer, found: Found) -> Episode:
    """One scored episode of the model, drawn as the recipe evaluates."""
    import asyncio

    from gropius import build
    from gropius.models.chat import ChatFormat
    from gropius.rollout.collect import CollectPlan, Player, collect
    from gropius.rollout.torch_engine import TorchEngine
    from gropius.train.evaluate import EVALUATION_STREAM
    from gropius.train.require import sampling_of

    resolved = found.resolved
    loaded = build.model(resolved, found.model)
    system = resolved.data.system_prompt if resolved.data.system_prompt is not None else tasks.system_prompt
    engine = TorchEngine(loaded, token_budget=resolved.rollout.token_budget, dtype=resolved.model.dtype)
    chat = ChatFormat.for_model(loaded, system_prompt=system, template_options=resolved.data.template)
    plan = CollectPlan(
        sampling=replace(sampling_of(resolved, loaded), temperature=resolved.eval.temperature),
        group_size=1,
        seed=resolved.seed,
        step=EVALUATION_STREAM,
        max_turns=resolved.rollout.max_turns,
        max_episode_tokens=resolved.rollout.max_episode_tokens,
    )
    groups = asyncio.run(collect([task], plan, Player(engine, chat, tasks, scorer, loaded.context_length)))
    return groups[0].episodes[0]


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
