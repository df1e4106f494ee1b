"""The vLLM side of ../rollout.py, run by an interpreter that has vLLM.

    vllm_rollout.py MODEL DTYPE eager|compiled POSITIONS

Reads a JSON line of work (rows of ids, limit, stop ids, seed), draws with vLLM's own sampler, answers with a JSON line:
ids, wall and processor seconds of all its processes, peak memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of every weight that is cast
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams

    model, dtype, how, positions = sys.argv[1:5]
    engine = LLM(
        model, dtype=dtype, enforce_eager=how == "eager", generation_config="vllm", max_model_len=int(positions),
        max_num_seqs=256, enable_prefix_caching=True, kv_cache_memory_bytes=1 << 30, skip_tokenizer_init=True,
    )  # fmt: skip
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        work: dict[str, Any] = json.loads(line)
        rules = [
            SamplingParams(
                temperature=1.0, max_tokens=work["limit"], stop_token_ids=work["stop"], ignore_eos=True,
                detokenize=False, logprobs=0, seed=work["seed"] * 100_003 + n,
            )
            for n in range(len(work["rows"]))
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": row} for row in work["rows"]]
        wall, cpu = time.perf_counter(), processor_s()
        outputs = engine.generate(prompts, rules, use_tqdm=False)
        seconds, used = time.perf_counter() - wall, processor_s() - cpu
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        answer = {"ids": ids, "wall_s": seconds, "cpu_s": used, "peak_bytes": peak_bytes()}
        print(json.dumps(answer), file=answers, flush=True)


def processes() -> list[int]:
    """This process and all below it."""
    found, pending = [], [os.getpid()]
    while pending:
        found.append(pending.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            pending += [int(word) for word in children.read_text().split()]
    return found


def processor_s() -> float:
    """Processor seconds of all of them."""
    ticks = 0
    for pid in processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_bytes() -> int:
    """The largest resident memory of each so far, added."""
    total = 0
    for pid in processes():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
    return total


if __name__ == "__main__":
    main()
