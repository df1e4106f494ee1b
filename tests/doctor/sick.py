"""Runs that really train a very small model: a healthy one, and one for each finding with that fault in it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from gropius import build
from gropius.recipe import resolve
from gropius.rewards.base import InProcessScorer, RewardPart
from gropius.rollout.torch_engine import TorchEngine
from gropius.train import loop
from gropius.train.progress import Silent
from gropius.types import Episode, Outcome, rejected, scored, void

TASKS = {"source": "arithmetic", "options": {"digits": 1, "terms": 3, "rows": [400, 100]}}
TINY = {"source": "tiny", "tiny": {"hidden": 48, "layers": 2, "heads": 2, "kv_heads": 2, "mlp": 96}}
WARM: dict[str, Any] = {
    "name": "warm",
    "seed": 3,
    "model": TINY,
    "data": TASKS,
    "rollout": {"max_tokens": 6},
    "sft": {"steps": 260, "batch": 64, "learning_rate": 4e-3, "warmup_steps": 10, "schedule": "linear"},
    "train": {"threads": 1},
    "eval": {"before": False, "tasks": 20},
}
HEALTHY: dict[str, Any] = {
    "name": "run",
    "data": TASKS,
    "rollout": {"prompts": 8, "group_size": 8, "max_tokens": 6},
    "train": {"steps": 24, "learning_rate": 2e-4, "warmup_steps": 3, "threads": 1},
    "eval": {"before": False, "after": False},
    "checkpoint": {"final": False},
}
BOTH_ENDS = ("eval.before=true", "eval.after=true", "eval.samples=2")
NO_KL = ('objective.kl.estimator="none"', "objective.kl.coefficient=0.0")
Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def warm_model(out: Path) -> Path:
    """Warm-start it (some seconds); the folder of the model."""
    return build.sft(resolve(WARM, [f'out="{out}"']), Silent()) / "model"


def train(out: Path, model: Path, settings: Sequence[str] = (), faults: Sequence[Patch] = ()) -> Path:
    """Train from the warm model with the faults in; the run folder."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        resolved = resolve(HEALTHY, [f'out="{out}"', f'model.source="{model}"', "seed=1", *settings])
        return build.train(resolved, Silent())


@dataclass(frozen=True)
class Sick:
    """One sick run: the finding that must fire and nothing else above a note, what is set, what is broken.

    cause: a word that the likely cause must hold. quick: cheap enough for every test run.
    """

    finding: str
    settings: tuple[str, ...] = ()
    faults: tuple[Patch, ...] = ()
    cause: str = ""
    quick: bool = False


def right(episode: Episode) -> float:
    """1 when the reply is the answer."""
    return float(episode.last_reply.strip() == episode.task.answer)


def draw(episode: Episode, salt: str = "") -> float:
    """A number in [0, 1) that belongs to the episode."""
    key = f"{salt}:{episode.group_id}:{episode.member}".encode()
    return float(np.random.default_rng(list(key)).random())


def task_draw(episode: Episode) -> float:
    """A number in [0, 1) that belongs to the task."""
    return float(np.random.default_rng(list(episode.task.key.encode())).random())


def rewarded(*parts: tuple[str, float, Callable[[Episode], Any], bool]) -> Patch:
    """Other rewards: (name, weight, function, is it the task metric?). Without such a part the metric is `right`."""

    def scorer(*args: Any, **kwargs: Any) -> InProcessScorer:
        made = []
        for i, (name, weight, function, metric) in enumerate(parts):
            own = (lambda e, o: o.value) if metric else ((lambda e, o: right(e)) if i == 0 else None)
            made.append(RewardPart(name, weight, function, metric=own))
        return InProcessScorer(tuple(made))

    return lambda: patch.object(build, "scorer", scorer)


def sampler(change: Callable[[TorchEngine, Any, Callable[..., Any]], Any]) -> Patch:
    """Another engine behaviour: change(engine, request, honest) is awaited in place of `complete`."""
    honest = TorchEngine.complete

    async def complete(self: TorchEngine, request: Any) -> Any:
        return await change(self, request, lambda r: honest(self, r))

    return lambda: patch.object(TorchEngine, "complete", complete)


async def one_stream(engine: TorchEngine, request: Any, honest: Callable[..., Any]) -> Any:
    """All siblings draw with the same random numbers."""
    return await honest(dataclasses.replace(request, stream=(*request.stream[:-1], 0)))


async def hot(engine: TorchEngine, request: Any, honest: Callable[..., Any]) -> Any:
    """The sampler divides the logits by more than it was asked to."""
    return await honest(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.5)))


async def after_top_k(engine: TorchEngine, request: Any, honest: Callable[..., Any]) -> Any:
    """The sampler cuts off unlikely tokens and reports what is left."""
    done = await honest(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, top_k=3)))
    return dataclasses.replace(done, logprobs=done.drawn_logprobs)


async def other_prompt(engine: TorchEngine, request: Any, honest: Callable[..., Any]) -> Any:
    """The sampler's template leaves the last token of the prompt out."""
    return await honest(dataclasses.replace(request, prompt_ids=request.prompt_ids[:-1]))


async def rounded(engine: TorchEngine, request: Any, honest: Callable[..., Any]) -> Any:
    """Log-probabilities in a number format of five bits of mantissa."""
    done = await honest(request)
    noise = np.random.default_rng(list(request.stream)).normal(0, 0.05, len(done.logprobs))
    return dataclasses.replace(done, logprobs=(done.logprobs + noise).astype(np.float32))


def stale_weights() -> contextlib.AbstractContextManager[Any]:
    """The engine keeps the weights it was made with and says that they are new."""
    honest = TorchEngine.__init__

    def init(self: TorchEngine, loaded: Any, **kwargs: Any) -> None:
        frozen = copy.deepcopy(loaded.model).requires_grad_(False)
        honest(self, dataclasses.replace(loaded, model=frozen), **kwargs)

    return patch.object(TorchEngine, "__init__", init)


def late_weights() -> contextlib.AbstractContextManager[Any]:
    """The engine takes new weights over in every eighth step only, and says truly which it has."""
    honest, made = TorchEngine.set_policy, TorchEngine.__init__
    trained: dict[int, Any] = {}

    def init(self: TorchEngine, loaded: Any, **kwargs: Any) -> None:
        own = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model).requires_grad_(False))
        made(self, own, **kwargs)
        trained[id(self)] = (loaded.model, own.model)

    def set_policy(self: TorchEngine, version: int, digest: str) -> None:
        if version % 8 == 0:
            source, own = trained[id(self)]
            own.load_state_dict(source.state_dict())
            honest(self, version, "")

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(TorchEngine, "__init__", init))
    stack.enter_context(patch.object(TorchEngine, "set_policy", set_policy))
    return stack


def never_stops() -> contextlib.AbstractContextManager[Any]:
    """The sampler has no stop token in its list."""
    honest = loop.sampling_of
    return patch.object(loop, "sampling_of", lambda *a: dataclasses.replace(honest(*a), stop_token_ids=()))


def other_reference() -> contextlib.AbstractContextManager[Any]:
    """The reference is not the model that the run began with."""
    honest = copy.deepcopy

    def perturbed(value: Any, *memo: Any) -> Any:
        made = honest(value, *memo)
        if isinstance(made, torch.nn.Module):
            noise = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=noise))
        return made

    return patch.object(build.copy, "deepcopy", perturbed)


@contextlib.contextmanager
def ever_surer() -> Iterator[None]:
    """Every update makes the logits a third larger: the policy grows certain and learns nothing by it."""
    honest = loop.update

    def update(run: Any, *arguments: Any) -> Any:
        reports = honest(run, *arguments)
        with torch.no_grad():
            run.loaded.model.model.norm.weight.mul_(1.35)
        return reports

    with patch.object(loop, "update", update):
        yield


def exact(episode: Episode) -> Outcome:
    """The task's own reward."""
    return scored(1.0) if right(episode) else rejected("wrong")


def half_broken(episode: Episode) -> Outcome:
    """A verifier that fails on one response in ten."""
    return void("the verifier crashed") if draw(episode) < 0.1 else exact(episode)


def too_hard_or_too_easy(episode: Episode) -> float:
    """Half of the tasks are always right and nearly all others always wrong."""
    place = task_draw(episode)
    return 1.0 if place < 0.48 else right(episode) if place > 0.93 else 0.0


def half_of_the_golds(episode: Episode) -> float:
    """Half of the gold answers are wrong, so the best policy there is solves half."""
    return right(episode) if task_draw(episode) < 0.5 else 0.0


def pays_for_length(episode: Episode) -> float:
    """A wrong answer is paid for being long."""
    return 1.0 if right(episode) else 0.15 * min(6, len(episode.last_reply))


def pays_for_a_two(episode: Episode) -> float:
    """Any answer that begins with 2 is paid as if it were right."""
    return 1.0 if right(episode) or episode.last_reply.startswith("2") else 0.0


def spiky(episode: Episode) -> float:
    """Two steps have rewards of another size."""
    return right(episode) * (500.0 if int(episode.group_id[:6]) in (11, 19) else 1.0)


def one_loud_task(episode: Episode) -> float:
    """One task in eight pays a hundred times as much."""
    return right(episode) * (100.0 if episode.task.key in LOUD else 1.0)


LOUD: set[str] = set()


@contextlib.contextmanager
def loud() -> Iterator[None]:
    """Choose the loud task: the one of the eight training tasks whose key sorts first."""
    honest = build.tasks

    def tasks(resolved: Any) -> Any:
        found = honest(resolved)
        LOUD.clear()
        LOUD.add(sorted(task.key for task in found.train)[0])
        return found

    with patch.object(build, "tasks", tasks):
        yield


FEW = 'data.options={"digits"=1,"terms"=3,"rows"=[8,100]}'
FAR = "train.mismatch_bound=1e9"

SICK: dict[str, Sick] = {
    "no right answer": Sick("all_failed_groups", faults=(rewarded(("exact", 1.0, lambda e: 0.0, True)),), quick=True),
    "too easy": Sick("all_solved_groups", faults=(rewarded(("any", 1.0, lambda e: 1.0, True)),)),
    "one random stream": Sick("identical_siblings", faults=(sampler(one_stream),), cause="random numbers", quick=True),
    "one loud prompt": Sick(
        "few_prompts_carry_signal",
        (FEW, 'objective.advantage.scale="none"', *NO_KL),
        (loud, rewarded(("loud", 1.0, one_loud_task, False))),
    ),
    "too hard or too easy": Sick("budget_waste", faults=(rewarded(("x", 1.0, too_hard_or_too_easy, True)),)),
    "by heart": Sick(
        "reward_without_held_out",
        (*BOTH_ENDS, FEW, *NO_KL, "train.learning_rate=1e-3", "train.steps=40"),
    ),
    "one loud part": Sick(
        "dominant_reward_part",
        faults=(rewarded(("exact", 1.0, exact, True), ("noise", 30.0, lambda e: draw(e, "noise"), False)),),
    ),
    "a silent part": Sick(
        "dead_reward_part",
        faults=(rewarded(("exact", 1.0, exact, True), ("format", 1.0, lambda e: float("<a>" in e.completion), False)),),
        quick=True,
    ),
    "a broken verifier": Sick("void_verdicts", faults=(rewarded(("exact", 1.0, half_broken, True)),), cause="crashed"),
    "hacked": Sick(
        "reward_hacking",
        (*NO_KL, "train.learning_rate=1e-3", "train.steps=50"),
        (rewarded(("score", 1.0, pays_for_a_two, False)),),
    ),
    "long wrong answers": Sick(
        "length_growth_of_wrong_answers",
        (*NO_KL, "rollout.max_tokens=12", "train.learning_rate=2e-3", "train.steps=40"),
        (rewarded(("score", 1.0, pays_for_length, False)),),
    ),
    "short of tokens": Sick("truncation", ("rollout.max_tokens=2",), quick=True),
    "no stop token": Sick("stop_not_learned", faults=(never_stops,)),
    "too fast": Sick("policy_collapse", (*NO_KL, "train.learning_rate=0.03", "train.grad_clip=0.0")),
    "ever surer": Sick("entropy_collapse", NO_KL, (ever_surer, rewarded(("exact", 1.0, half_of_the_golds, True)))),
    "too many updates": Sick(
        "clip_fraction_high",
        ("train.epochs=8", "objective.surrogate.low=0.0005", "objective.surrogate.high=0.0005", *NO_KL),
    ),
    "no movement": Sick("clip_never_reached", ("train.updates=4", "train.learning_rate=1e-9", *NO_KL)),
    "no leash": Sick("kl_drift", ("objective.kl.coefficient=1e-9", "train.learning_rate=2e-3")),
    "another reference": Sick("kl_estimator", faults=(other_reference,), cause="reference"),
    "two loud steps": Sick(
        "gradient_spikes",
        ('objective.advantage.scale="none"', *NO_KL),
        (rewarded(("spiky", 1.0, spiky, False)),),
    ),
    "one reward for all": Sick("zero_gradient", NO_KL, (rewarded(("one", 1.0, lambda e: 1.0, False)),), cause="same"),
    "hot sampler": Sick("sampler_trainer_mismatch", (FAR,), (sampler(hot),), cause="temperature"),
    "top-k sampler": Sick("sampler_trainer_mismatch", (FAR,), (sampler(after_top_k),), cause="truncated sampling"),
    "another template": Sick("sampler_trainer_mismatch", (FAR,), (sampler(other_prompt),), cause="template"),
    "rounding": Sick("sampler_trainer_mismatch", (FAR,), (sampler(rounded),), cause="dtype"),
    "stale weights": Sick("sampler_trainer_mismatch", (FAR,), (stale_weights,), cause="stale weights"),
    "late weights": Sick("stale_sampler", faults=(late_weights,)),
    "heavy weights": Sick(
        "weight_concentration",
        (
            "train.updates=8",
            "train.learning_rate=0.01",
            "train.warmup_steps=0",
            "train.steps=6",
            *NO_KL,
            'objective.surrogate.kind="none"',
            'objective.ratio.level="sequence_product"',
        ),
    ),
}
