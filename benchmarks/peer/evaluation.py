"""One held-out evaluation for both sides, and a learning curve whose clock stands still while it is measured."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gropius import build
from gropius.models.chat import ChatFormat
from gropius.models.load import load_model
from gropius.recipe import resolve
from gropius.rollout.collect import Player
from gropius.rollout.torch_engine import TorchEngine
from gropius.train import loop
from gropius.train.evaluate import HeldOut
from peer.measure import Moment


class Evaluator:
    """The recipe's held-out tasks, rewards and sampling, for the weights of any trainer."""

    def __init__(self, job: dict[str, Any]):
        self.plan = resolve(job["recipe"], job["settings"])
        self.tasks = build.tasks(self.plan)
        self._judge = build.scorer(self.plan, self.tasks)
        self._loaded: Any = dataclasses.replace(load_model(job["model"]), model=None)

    def of_model(self, model: Any) -> HeldOut:
        """mean@k of a model, drawn by our engine from the recipe's own random streams."""
        loaded = dataclasses.replace(self._loaded, model=model)
        system = self.plan.data.system_prompt if self.plan.data.system_prompt is not None else self.tasks.system_prompt
        chat = ChatFormat.for_model(loaded, system_prompt=system, template_options=self.plan.data.template)
        engine = TorchEngine(loaded, dtype=self.plan.model.dtype)
        player = Player(engine, chat, self.tasks, self._judge, loaded.context_length)
        try:
            return asyncio.run(loop.evaluate_held_out(self.plan, loaded, player))
        finally:
            del engine, player
            gc.collect()  # an engine and its batch know each other; its slots are a gigabyte


class Curve:
    """Held-out quality over steps and over the seconds that training took; evaluations stop the clock."""

    def __init__(self, job: dict[str, Any], evaluate: Callable[[], HeldOut]):
        self.every, self.enough, self.trace = job["every"], job["enough"], Path(job["trace"])
        self.evaluate = evaluate
        self.points: list[dict[str, float]] = []
        self._spent, self._running = Moment(0.0, 0.0), Moment.now()

    def measure(self, step: int) -> float:
        """Measure now; the held-out mean. Every point is also written at once, for a run that is cut off."""
        self._spent += Moment.now() - self._running
        found = self.evaluate()
        share = found.mean
        point = {
            "step": step, "wall_s": self._spent.wall, "cpu_s": self._spent.cpu,
            "held_out": share.value, "low": share.low, "high": share.high,
        }  # fmt: skip
        self.points.append(point)
        with self.trace.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        self._running = Moment.now()
        return share.value

    def step(self, step: int) -> bool:
        """After an optimiser step: measure when it is due. True when the quality asked for is reached."""
        return step % self.every == 0 and self.measure(step) >= self.enough
