"""Run by an interpreter that has vLLM. What it finds is the last line it prints, as JSON.

colocated               vLLM in a thread of this process: differences from this package's own engine
loads FOLDER IDS        greedy ids and log-probabilities of vLLM's own `LLM` on an exported folder
"""

import asyncio
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def colocated():
    from gropius.models.load import load_model
    from gropius.models.tiny import TinyShape
    from gropius.rollout.torch_engine import TorchEngine
    from gropius.rollout.vllm.open import Trainer, open_vllm
    from gropius.types import Request, Sampling

    loaded = load_model("tiny", tiny=TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, mlp=64, context=64))
    table = {
        "mode": "colocated", "python": "", "address": "", "devices": "", "dtype": "auto", "max_model_len": 0,
        "max_num_seqs": 16, "gpu_memory_utilization": 0.4, "kv_cache_gib": 0.25, "enforce_eager": True,
        "start_timeout_s": 600.0, "hang_s": 300.0, "lora": "merged",
    }  # fmt: skip
    engine = open_vllm(loaded, table, Trainer("float32", 1e-3))
    found = {"equal": 0, "largest": 0.0, "line": engine.describe()}

    async def drawn(by):
        requests = [Request((9, 10, 11 + n), Sampling(8, stop_token_ids=(3,)), (1, 2, 3, n)) for n in range(6)]
        return await asyncio.gather(*map(by.complete, requests))

    for version in range(2):
        for parameter in loaded.model.parameters():
            parameter.data.mul_(1.05)
        engine.set_policy(version, f"digest {version}")
        for theirs, mine in zip(asyncio.run(drawn(engine)), asyncio.run(drawn(TorchEngine(loaded))), strict=True):
            found["equal"] += theirs.token_ids.tolist() == mine.token_ids.tolist()
            found["largest"] = max(found["largest"], float(abs(theirs.logprobs - mine.logprobs).max()))
    asyncio.run(engine.close())
    return found


def loads(folder, ids):
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, max_model_len=64)
    rules = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    (output,) = model.generate({"prompt_token_ids": ids}, rules, use_tqdm=False)
    (drawn,) = output.outputs
    tokens = list(drawn.token_ids)
    return {"ids": tokens, "logprobs": [at[token].logprob for at, token in zip(drawn.logprobs, tokens, strict=True)]}


if __name__ == "__main__":
    answer = colocated() if sys.argv[1] == "colocated" else loads(sys.argv[2], json.loads(sys.argv[3]))
    print("\n" + json.dumps(answer), flush=True)
