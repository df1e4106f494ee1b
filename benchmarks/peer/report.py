"""What is printed of a comparison: ratios with their spread, beside the figures that they are made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from peer.measure import spread

DISTURBED = 0.15  # cores that others may use before a sample counts as disturbed
CLOCKS = ("wall", "processor")


def batch(text: str, recorded: dict[str, Any], group: int) -> None:
    """What both sides train on."""
    rewards = recorded["rewards"]
    groups = [rewards[n : n + group] for n in range(0, len(rewards), group)]
    lengths = [len(ids) for ids in recorded["completions"]]
    live = sum(len(set(g)) > 1 for g in groups)
    print(
        f"\n== {text}: {len(groups)} x {group}, first prompt {len(recorded['prompts'][0])} tokens, responses "
        f"{min(lengths)} to {max(lengths)} tokens (mean {sum(lengths) / len(lengths):.1f}), {live} of {len(groups)} "
        f"groups live, mean reward {sum(rewards) / len(rewards):.3f}"
    )


def agreement(name: str, f: dict[str, Any]) -> None:
    """Loss and gradient of both sides under one objective."""
    verdict = "ok" if f["difference"] < 1e-3 else "APART"
    print(
        f"agree {name:8} loss {f['loss']:+.7f} TRL {f['their_loss']:+.7f}   |gradient| {f['norm']:.6g} "
        f"TRL {f['their_norm']:.6g}   relative difference {f['difference']:.1e} over {f['parameters']:,} "
        f"parameters {verdict}",
        flush=True,
    )


def _seconds(answer: dict[str, Any], phase: str, clock: int) -> float:
    return statistics.median(step[phase][clock] for step in answer["steps"])


def speed(rounds: Sequence[dict[str, Any]], recorded: dict[str, Any]) -> None:
    """Seconds, tokens a second and memory of each variant, and the ratios to ours, round by round."""
    tokens = sum(map(len, recorded["prompts"])) + sum(map(len, recorded["completions"]))
    ours = [row["gropius"] for row in rounds]
    for name in rounds[0]:
        answers = [row[name] for row in rounds]
        print(f"{name}")
        for clock, label in enumerate(CLOCKS):
            taken = {p: [_seconds(a, p, clock) for a in answers] for p in ("step", "sampling", "training")}
            text = ", ".join(f"{phase} {spread(values)}" for phase, values in taken.items())
            print(f"  {label:9} seconds: {text}; tokens/s of the step {tokens / statistics.median(taken['step']):.0f}, "
                  f"of training {tokens / statistics.median(taken['training']):.0f}")  # fmt: skip
            if name != "gropius":
                ratios = {p: [v / _seconds(o, p, clock) for v, o in zip(values, ours, strict=True)]
                          for p, values in taken.items()}  # fmt: skip
                print("    over ours: " + ", ".join(f"{phase} {spread(values)}x" for phase, values in ratios.items()))
        memory = [_peak(a) for a in answers]
        less = [_peak(o) / m for o, m in zip(ours, memory, strict=True)]
        drawn = statistics.median(t for a in answers for t in a["drawn_tokens"])
        print(f"  peak memory {spread(memory)} GiB" + (f"; ours is {spread(less)} of it" if name != "gropius" else "")
              + f"; it drew {drawn:.0f} tokens a step; {disturbed(answers)}")  # fmt: skip


def _peak(answer: dict[str, Any]) -> float:
    """GiB of the GPU where one was used, else of the process."""
    return float(answer["device_peak_bytes"] or answer["peak_bytes"]) / 2**30


def disturbed(answers: Sequence[dict[str, Any]]) -> str:
    """How busy others were, and how many samples that disturbed."""
    busy = [a["neighbours"] for a in answers]
    count = sum(b > DISTURBED for b in busy)
    return f"others used {spread(busy)} cores, {count} of {len(busy)} samples disturbed"


def shares(found: dict[str, Any], dtype: str) -> None:
    """Each saving against the rung below it; the gradient norms beside, which must agree."""
    above: list[list[float]] | None = None
    print(f"savings in one update, {dtype}; {disturbed([found])}")
    for name, samples in found["cases"].items():
        times = [[s["time"][clock] for s in samples] for clock in (0, 1)]
        gain = "" if above is None else "   " + ", ".join(
            f"{label} {spread([a / b for a, b in zip(above[c], times[c], strict=True)])}x"
            for c, label in enumerate(CLOCKS))  # fmt: skip
        print(f"  {name:28} wall {spread(times[0], '.3f')} s, processor {spread(times[1], '.3f')} s, "
              f"{samples[0]['run_tokens']} tokens run, gradient norm {samples[0]['norm']:.5f}{gain}")  # fmt: skip
        above = times
    limit(found, "dead rows skipped", dtype)


def scaling(found: dict[str, Any], dtype: str) -> None:
    """Seconds a token at each size."""
    print(f"one update at more tokens, {dtype}; {disturbed([found])}")
    for name, samples in found["cases"].items():
        run = samples[0]["run_tokens"]
        each = [[s["time"][clock] / run * 1e3 for s in samples] for clock in (0, 1)]
        print(
            f"  {name}: {run} tokens run, ms a token: wall {spread(each[0], '.3f')}, processor {spread(each[1], '.3f')}"
        )
    limit(found, "4x", dtype)


def limit(found: dict[str, Any], case: str, dtype: str) -> None:
    """6 operations a parameter and token over the rate of the matrix product in the same process; the share reached."""
    samples = found["cases"][case]
    first = samples[0]
    n, head = found["matmul_parameters"], found["head_parameters"]
    plain = 6 * n * first["run_tokens"]
    strict = 6 * ((n - head) * first["run_tokens"] + head * first["loss_tokens"])
    for clock, (label, key) in enumerate(zip(CLOCKS, (dtype, f"{dtype} cpu"), strict=True)):
        rate = found["rates"][key]
        taken = min(s["time"][clock] for s in samples)
        print(
            f"  limit, {label}: 6 x {n:,} x {first['run_tokens']} = {plain / 1e12:.2f} TFLOP at {rate / 1e9:.0f} "
            f"GFLOP/s = {plain / rate:.2f} s; taken {taken:.2f} s: {plain / rate / taken:.0%} of the limit "
            f"({strict / rate / taken:.0%} with the head counted on loss tokens only)"
        )
