"""The worker of TRL's side: its own GRPOTrainer, train() and all, on our recorded batch or on its own rollouts.

    python -m peer.theirs JOB.json ANSWER.json        (in an environment that has TRL)

Only what a run draws is given, where a job says so: `_generate` is still run and timed, and its answer is exchanged for
the recorded completions; `_calculate_rewards` likewise. Loss, gradient, clipping, optimiser and loop are untouched.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from peer.evaluation import Curve, Evaluator
from peer.measure import Moment, peak_bytes


def trainer_of(job: dict[str, Any], rows: list[dict[str, Any]], rewards: list[Any]) -> GRPOTrainer:
    """A trainer as its users make one: a folder, a data set of messages, reward functions."""
    device = job.get("device", "cpu")
    flash = device != "cpu" and importlib.util.find_spec("flash_attn") is not None
    options = {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}} if flash else {}
    config = GRPOConfig(
        output_dir=job["folder"], report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=10,
        use_cpu=device == "cpu", gradient_checkpointing=False, lr_scheduler_type="constant",
        shuffle_dataset=job.get("shuffle", False), **options, **job["config"],
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    return GRPOTrainer(
        job["model"], rewards, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


def dataset_of(job: dict[str, Any], batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The recorded prompts: messages for a model with a chat template, else text."""
    plain = AutoTokenizer.from_pretrained(job["model"]).chat_template is None
    return [{"prompt": messages[-1]["content"] if plain else messages} for messages in batch["messages"]]


class Given:
    """The recorded batch in place of what was drawn, and the clock of the drawing."""

    def __init__(self, trainer: GRPOTrainer, batch: dict[str, Any], draw: bool):
        self.trainer, self.batch, self.draw = trainer, batch, draw
        self.sampling: list[Moment] = []
        self.drawn_tokens: list[int] = []
        self._generate, self._score = trainer._generate, trainer._calculate_rewards
        self._whole = trainer._generate_and_score_completions
        trainer._generate = self.generate
        trainer._calculate_rewards = self.rewards
        trainer._generate_and_score_completions = self.whole

    def generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Draw, take the time, and hand out the recorded rows."""
        began = Moment.now()
        if self.draw:
            drawn = self._generate(prompts)[1]
            self.drawn_tokens.append(sum(map(len, drawn)))
        self.sampling.append(Moment.now() - began)
        ids = self.batch["completions"]
        texts = self.trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
        completions = texts if isinstance(prompts[0], str) else [[{"role": "assistant", "content": t}] for t in texts]
        return self.batch["prompts"], ids, None, completions, None, {}, None, None

    def rewards(self, *given: Any) -> torch.Tensor:
        """Run the reward function, and hand out the recorded rewards."""
        found: torch.Tensor = self._score(*given)
        recorded = torch.tensor(self.batch["rewards"], dtype=found.dtype, device=found.device)
        return recorded[:, None].expand(found.shape)

    def whole(self, inputs: Any) -> dict[str, Any]:
        """The scored batch, with recorded log-probabilities of anchor and reference where the trainer uses them."""
        made: dict[str, Any] = self._whole(inputs)
        for name, key in (("old_per_token_logps", "anchor"), ("ref_per_token_logps", "reference")):
            if name in made and key in self.batch:
                width = made[name].shape[1]
                rows = [row + [0.0] * (width - len(row)) for row in self.batch[key]]
                made[name] = torch.tensor(rows, dtype=made[name].dtype, device=made[name].device)
        return made


class Marks(TrainerCallback):  # type: ignore[misc]
    """When optimiser steps begin and end."""

    def __init__(self) -> None:
        self.begun: list[Moment] = []
        self.ended: list[Moment] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before the batch of the step is drawn."""
        self.begun.append(Moment.now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After the optimiser has moved."""
        self.ended.append(Moment.now())


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """Optimiser steps on the recorded batch, drawing as usual and training on the record."""
    batch = job["batch"]
    trainer = trainer_of(job, dataset_of(job, batch), [last_number_reward(batch["answers"])])
    given, marks = Given(trainer, batch, job["draw"]), Marks()
    trainer.add_callback(marks)
    trainer.train()
    taken = [end - begin for begin, end in zip(marks.begun, marks.ended, strict=True)]
    return {
        "steps": [
            {"step": whole.as_list(), "sampling": drawn.as_list(), "training": (whole - drawn).as_list()}
            for whole, drawn in zip(taken, given.sampling, strict=True)
        ],
        "drawn_tokens": given.drawn_tokens, "peak_bytes": peak_bytes(), "device_peak_bytes": device_peak(),
        "dtype": str(next(trainer.model.parameters()).dtype), "versions": versions(),
    }  # fmt: skip


def gradient(job: dict[str, Any]) -> dict[str, Any]:
    """Loss and full parameter gradient of one optimiser step at learning rate 0; the gradient goes to a file."""
    from safetensors.torch import save_file

    batch = job["batch"]
    trainer = trainer_of(job, dataset_of(job, batch), [last_number_reward(batch["answers"])])
    Given(trainer, batch, draw=False)
    losses: list[float] = []
    compute = trainer._compute_loss

    def compute_loss(*given: Any) -> torch.Tensor:
        """Keep the value."""
        loss: torch.Tensor = compute(*given)
        losses.append(loss.item())
        return loss

    class Catch(TrainerCallback):  # type: ignore[misc]
        """Write the gradient before the optimiser uses it."""

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            """The accumulated gradient of every parameter, as it is."""
            found = {n: p.grad.float().contiguous() for n, p in model.named_parameters() if p.grad is not None}
            save_file(found, job["gradient"])

    trainer._compute_loss = compute_loss
    trainer.add_callback(Catch())
    trainer.train()
    return {"loss": sum(losses), "micro_batches": len(losses), "versions": versions()}


def learn(job: dict[str, Any]) -> dict[str, Any]:
    """Train on its own rollouts; every so many steps our held-out evaluation of its weights, with the clock stopped."""
    evaluator = Evaluator(job)
    tasks = evaluator.tasks.train
    prompts = dataset_of(job, {"messages": [[dict(message) for message in task.messages()] for task in tasks]})
    rows = [row | {"answer": task.answer} for row, task in zip(prompts, tasks, strict=True)]
    trainer = trainer_of(job | {"shuffle": True}, rows, [last_number_of_column])
    curve = Curve(job, lambda: evaluator.of_model(trainer.model))

    class Watch(TrainerCallback):  # type: ignore[misc]
        """The clock runs between these."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Before anything is drawn."""
            curve.measure(0)

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            """After each optimiser step."""
            control.should_training_stop |= curve.step(state.global_step)

    trainer.add_callback(Watch())
    trainer.train()
    return {"curve": curve.points, "peak_bytes": peak_bytes(), "versions": versions()}


def last_number_reward(answers: dict[str, str]) -> Any:
    """The reward of a recorded batch, for its time only: what it returns is exchanged for the record."""

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """1 where the last number is the answer."""

        return [_right(_text(c), answers.get(_text(p), "")) for p, c in zip(prompts, completions, strict=True)]

    return reward


def last_number_of_column(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The recipe's reward `last_number`, by the same reader of numbers."""
    return [_right(_text(c), a) for c, a in zip(completions, answer, strict=True)]


def _text(said: Any) -> str:
    """Of a prompt or completion, text or messages."""
    return str(said if isinstance(said, str) else said[-1]["content"])


def _right(text: str, answer: str) -> float:
    from gropius.rewards.number import NumberTooLong, last_number_in

    try:
        return float(last_number_in(text) == last_number_in(answer))
    except NumberTooLong:
        return 0.0


def device_peak() -> int:
    """Of a GPU, where there is one."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def versions() -> str:
    """What ran."""
    import transformers
    import trl

    return f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    kinds = {"steps": steps, "gradient": gradient, "learn": learn}
    Path(sys.argv[2]).write_text(json.dumps(kinds[asked["kind"]](asked)), encoding="utf-8")
