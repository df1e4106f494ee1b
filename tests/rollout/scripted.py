"""Players whose policy is known: what the tests of collecting and selecting share."""

import asyncio
from dataclasses import dataclass, field

from gropius.models.chat import ChatFormat
from gropius.models.tiny import tiny_tokenizer
from gropius.rollout.collect import CollectPlan, Player, collect
from gropius.rollout.engine import ScriptedEngine, pass_rate_policy
from gropius.tasks.base import TaskSet
from gropius.types import EnvironmentStep, Sampling, Task, Verdict, scored

TOKENIZER = tiny_tokenizer()
EOS, V = 3, len(TOKENIZER)
Y, N = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "yn")
TASKS = [Task(f"t{i}", f"{i}?", "y") for i in range(4)]
SAMPLING = Sampling(4, stop_token_ids=(EOS,))


@dataclass
class Judge:
    """1 for a reply of "y". Notes what it was given, and how many were still being drawn."""

    unit: str = "episode"
    seen: list = field(default_factory=list)
    engine: ScriptedEngine | None = None
    drawing: list = field(default_factory=list)

    async def score(self, episodes):
        self.seen.append([(e.group_id, e.member) for e in episodes])
        if self.engine is not None:
            self.drawing.append(self.engine.active)
        return [Verdict(scored(float(e.last_reply == "y")), {}, float(e.last_reply == "y")) for e in episodes]


class Echo:
    """Says "again" until it was told "y", or `turns` times; then it is over."""

    def __init__(self, task, turns=3, fails=False):
        self.task, self.turns, self.fails, self.heard = task, turns, fails, []

    def start(self):
        return self.task.messages()

    def step(self, reply):
        self.heard.append(reply)
        if self.fails:
            raise KeyError("lost")
        done = reply == "y" or len(self.heard) >= self.turns
        return EnvironmentStep(({"role": "user", "content": "again"},), done, {"ok": 1.0} if done else {}, float(done))


def player(policy, environment=None, **settings):
    engine = ScriptedEngine(policy, decode=TOKENIZER.decode, **settings.pop("engine", {}))
    tasks = TaskSet("scripted", TASKS, (), None, environment, (), None, (), "")
    chat = ChatFormat(TOKENIZER, style=settings.pop("style", "chat"), stop_token_ids=(EOS,))
    return Player(engine, chat, tasks, settings.pop("scorer", Judge()), **settings)


def plan(**changes):
    return CollectPlan(**{"sampling": SAMPLING, "group_size": 3, "seed": 1, "step": 12, **changes})


def run(tasks, the_plan, the_player):
    return asyncio.run(collect(tasks, the_plan, the_player))


def coin(rate=0.5):
    return pass_rate_policy(rate, (Y, EOS), (N, EOS), V)
