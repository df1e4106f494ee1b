"""Run folders made by the records' own writer: groups with true arithmetic, hostile texts, damage on request."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gropius.objective.presets import resolve
from gropius.objective.selection import Response, assign
from gropius.objective.spec import Objective
from gropius.records import ResponseRecord, RunWriter, step_metrics
from gropius.types import rejected, scored, void

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
SPECIAL = ("<eos>", "<user>", "<assistant>", "<unk>")
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *ALPHABET))}

HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>",
    "<svg onload='window.pwned = 3'><a href=\"javascript:window.pwned = 4\">click</a></svg> [x](javascript:alert(1))",
    "\u202egnp.exe\u202c \u2066hidden\u2069 \x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07go\x1b]8;;\x07 \x00\x07",
    "[/INST] </s><|im_end|> <b onmouseover=window.pwned=5>b</b> <iframe src=//evil.example></iframe> <!-- &lt; &amp;",
)


def write_tokenizer(folder: Path) -> None:
    """One token a character, as the built-in model has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return [VOCABULARY.get(letter, VOCABULARY["<unk>"]) for letter in text] + [VOCABULARY["<eos>"]]


def document(objective: Objective, name: str = "synthetic", steps: int = 20) -> dict[str, Any]:
    return {
        "format": 1,
        "name": name,
        "seed": 0,
        "model": {"source": "somewhere/else"},
        "data": {"source": "arithmetic"},
        "reward": [{"name": "exact", "weight": 1.0}],
        "rollout": {"prompts": 8, "group_size": 8, "max_tokens": 64, "temperature": 1.0},
        "objective": objective.as_dict(),
        "train": {"steps": steps, "learning_rate": 3e-4},
        "preset": "grpo",
    }


def group_records(
    step: int, index: int, texts: Sequence[str], rewards: Sequence[float | None], seed: int = 0
) -> list[ResponseRecord]:
    """Records without advantages and weights; `trained` adds those of the whole step. reward None is void."""
    random = np.random.default_rng([seed, step, index])
    out, seen = [], set()
    prompt = f"Task {index}: add {17 + index} and {25 + step}."
    for member, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
        ids = np.array(encode(text), np.int64)
        anchor = -random.gamma(1.2, 0.5, len(ids))
        outcome = void("the verifier crashed") if reward is None else scored(reward)
        if reward is not None and reward < 0:
            outcome = rejected("no number in the answer", 0.0)
        out.append(
            ResponseRecord(
                step=step, group_id=f"{step:06d}-{index:04d}", member=member, task_key=f"arithmetic/{index}",
                prompt_ids=np.array(encode(prompt)), response_ids=ids, prompt_text=prompt, response_text=text,
                messages=json.dumps([{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]),
                loss_mask=np.ones(len(ids), np.bool_), parts={"exact": outcome}, status=outcome.status,
                reward=outcome.value, reason=outcome.reason, raw=outcome.value, state="", advantage=None,
                token_advantages=None, skipped=False, update=0, duplicate=text in seen,
                truncated=len(ids) > 60, finish_reason="length" if len(ids) > 60 else "stop", error="",
                policy_version=step, weight_digest="0f3a" * 8, sampling_time_s=0.5, scoring_time_s=0.01,
                sampler=anchor + random.normal(0, 2e-4, len(ids)), drawn=anchor, anchor=anchor,
                policy=anchor + random.normal(0, 0.12, len(ids)), reference=anchor + random.normal(0, 0.2, len(ids)),
                entropy=random.gamma(1.0, 0.4, len(ids)), weight=None, contribution=None,
            )
        )  # fmt: skip
        seen.add(text)
    return out


def trained(objective: Objective, records: Sequence[ResponseRecord]) -> tuple[list[ResponseRecord], float]:
    """The records with what training adds, by the package, and the loss of the step."""
    from gropius.viewer.response import evaluate

    rows = [
        Response(r.group_id, r.reward, r.loss_mask, r.status or "void", r.truncated, r.raw, anchor=np.asarray(r.anchor),
                 reference=np.asarray(r.reference), entropy=r.entropy)
        for r in records
    ]  # fmt: skip
    assignment = assign(objective, rows)
    states = {group.id: group.state for group in assignment.groups}
    out, losses = [], []
    for record, given in zip(records, assignment.responses, strict=True):
        advantage = None if record.status == "void" else given.value
        full = replace(record, state=states[record.group_id], advantage=advantage, weight=given.weight,
                       skipped=given.skipped, update=-1 if given.skipped else 0)  # fmt: skip
        zero = np.zeros(len(record.response_ids))
        contribution = zero if advantage is None else np.array(evaluate(objective, full, given.keep)["contribution"])
        out.append(replace(full, contribution=contribution))
        losses.append(math.fsum(contribution))
    return out, math.fsum(losses)


def with_environment(record: ResponseRecord) -> ResponseRecord:
    """The response as two turns of the model with a tool's answer between them."""
    mask = record.loss_mask.copy()
    mask[3:7] = False
    messages = [
        {"role": "user", "content": record.prompt_text},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "[1, 2]"}}]},
        {"role": "tool", "content": HOSTILE[0]},
    ]
    return replace(record, loss_mask=mask, messages=json.dumps(messages))


def step_records(step: int, groups: int, size: int, progress: float) -> list[ResponseRecord]:
    """Groups of which more are solved as progress goes from 0 to 1; every fourth group is hopeless at first."""
    random = np.random.default_rng([7, step])
    records: list[ResponseRecord] = []
    for index in range(groups):
        hard = 0.0 if index % 4 == 3 and progress < 0.6 else 0.15
        chance = min(0.97, hard + progress * (0.5 + 0.5 * (index % 3) / 2))
        right = random.random(size) < chance
        answer = 17 + index + 25 + step
        texts = [
            f"{17 + index} + {25 + step} = {answer if ok else answer + int(random.integers(1, 9))}" for ok in right
        ]
        rewards: list[float | None] = [float(ok) for ok in right]
        if index == 1:
            texts[-1], rewards[-1] = HOSTILE[step % len(HOSTILE)], -1.0
        if index == 2 and step % 5 == 0:
            rewards[0] = None
        if index == 4 and step % 3 == 0:
            texts[0] = "Let me think step by step. " * 6 + texts[0]
        records += group_records(step, index, texts, rewards)
        if index == 5:
            records[-1] = with_environment(records[-1])
    return records


def make_run(
    folder: Path, steps: int = 20, groups: int = 8, size: int = 8, objective: Objective | None = None
) -> RunWriter:
    """A whole run; the writer is returned open, so that the run is live until `close`."""
    objective = objective or resolve("grpo")
    writer = RunWriter.create(folder, document(objective, folder.name, steps))
    write_tokenizer(folder)
    for step in range(1, steps + 1):
        write_step(writer, objective, step, (steps, groups, size))
    writer.write_findings(
        [
            {
                "name": "dead_groups", "severity": "warning", "step": 3,
                "message": "A third of the groups carry no signal: every sibling failed.",
                "change": "Use easier tasks at first, or refill dead groups (objective.selection.dead = \"refill\").",
                "evidence": [{"step": 3, "group_id": "000003-0003"}, {"step": 4, "group_id": "000004-0003"}],
            },
            {"name": "reward_hacking", "severity": "critical", "step": 4, "message": "It rises alone.",
             "cause": "the check can be satisfied without solving", "key": "reward", "change": "check strictly",
             "evidence": [{"step": 3, "group_id": "000003-0005", "member": 1}], "explained_by": ""},
        ]
    )  # fmt: skip
    return writer


def write_step(writer: RunWriter, objective: Objective, step: int, shape: tuple[int, int, int]) -> None:
    """One more step of a run of `shape` (steps, groups, size)."""
    steps, groups, size = shape
    progress = (step - 1) / max(steps - 1, 1)
    records, loss = trained(objective, step_records(step, groups, size, progress))
    writer.write_rollouts(step, records)
    metrics: dict[str, Any] = dict(step_metrics(records, step * 1000))
    metrics |= {
        "loss": loss, "grad_norm": 1.2 - 0.5 * progress, "learning_rate": 3e-4, "kl": 0.02 * step / steps,
        "entropy": 1.1 - 0.7 * progress, "clip_ratio/region_mean": 0.04 + 0.01 * math.sin(step), "updates": 1,
        "clip_ratio/low_mean": 0.02, "clip_ratio/high_mean": 0.02 + 0.01 * math.sin(step),
        "sampling/sampling_logp_difference/mean": 2e-4, "step_time": 1.0 + 0.1 * math.sin(step),
    }  # fmt: skip
    if step % 5 == 0:
        value = 0.2 + 0.6 * progress
        metrics |= {"held_out/mean": value, "held_out/mean_low": value - 0.06, "held_out/mean_high": value + 0.05}
    if step == 7:
        metrics["grad_norm"] = float("nan")
    writer.write_metrics(step, metrics)
