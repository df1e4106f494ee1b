"""A run that trains an adapter: the same laws as any run, from the first KL to the last bit of a continuation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from batches import ARCHITECTURES, batch
from batches import build as random_model
from killed import killable
from small import RECIPE, run_small, small_recipe
from transformers import AutoModelForCausalLM

from gropius import build
from gropius.cli.main import main
from gropius.errors import ModelError, RunFolderError, UsageError
from gropius.models.load import load_model, save_model
from gropius.models.lora import LoraSettings, attach
from gropius.objective.presets import resolve as objective
from gropius.records.reader import RunReader
from gropius.records.replay import batches
from gropius.train import loop, reference
from gropius.train.export import export
from gropius.train.forward import Forward
from gropius.train.invariance import Batch, invariances
from gropius.train.progress import Silent
from gropius.train.sameness import compare
from gropius.train.step import LearnerSettings
from gropius.train.team import POLICY, Team

LORA = ["model.lora.rank=4", "train.learning_rate=3e-3"]
SAVED = [*LORA, "train.steps=4", "checkpoint.every=1", "checkpoint.keep_last=9"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), *SAVED)[0]


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    shutil.copytree(straight, tmp_path / "small")
    return tmp_path / "small"


def model_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}" / "model"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_adapters_gradient_is_the_same_in_every_layout(name: str) -> None:
    model = random_model(name)
    adapter = attach(model, LoraSettings(rank=3), 0, name)
    with torch.no_grad():
        for parameter in adapter.trained.values():
            parameter += 0.1 * torch.randn_like(parameter)
    forward = Forward.of(model)
    assert forward.packed, forward.note
    rows = invariances(forward, objective("dapo"), LearnerSettings(pack_tokens=4096), Batch(batch(groups=2)))
    assert len(rows) == 10 and all(row.held and row.bound == 1e-9 for row in rows), rows
    assert all(p.grad is None for n, p in model.named_parameters() if n not in adapter.trained)


STARTS: dict[str, tuple[list[str], type]] = {
    "a fresh adapter": ([], reference.AdapterOff),
    "several updates": (["train.updates=2"], reference.AdapterOff),
    "after a warm start": (["sft.steps=2", "sft.batch=8"], reference.AdapterCopy),
    "a reference that moves": (["train.reference_refresh=2"], reference.AdapterCopy),
    "a trained adapter": (["model.lora.adapter="], reference.AdapterCopy),
    "a KL in the reward": (["objective.kl.place=reward"], reference.AdapterOff),
}


@pytest.mark.parametrize("name", STARTS)
def test_the_kl_is_exactly_0_before_the_first_step_and_without_a_second_model(
    name: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, kind = STARTS[name]
    if name == "a trained adapter":
        settings, lora = [f'model.lora.adapter="{model_folder(straight, 4)}"'], []
    else:
        lora = LORA
    made: list[Any] = []
    honest = reference.make
    monkeypatch.setattr(reference, "make", lambda *given: made.append(honest(*given)) or made[-1])
    first_part: list[dict[str, float]] = []
    update = loop.update

    def watched(run: Any, credit: Any, known: Any) -> Any:
        reports = update(run, credit, known)
        first_part.append(reports[0][0].metrics)
        return reports

    monkeypatch.setattr(loop, "update", watched)
    folder, progress = run_small(tmp_path, *lora, "train.steps=3", "train.learning_rate=1e-2", *settings)
    assert type(made[0]) is kind
    if name == "a KL in the reward":
        records = RunReader(folder).rollouts(1)
        assert all((r.reference == r.anchor).all() for r in records if r.reference is not None)
        assert any((r.reference != r.anchor).any() for r in RunReader(folder).rollouts(3) if r.reference is not None)
    else:
        assert first_part[0]["kl"] == 0.0 and first_part[1]["kl"] > 0.0
    if name == "a reference that moves":
        assert first_part[2]["kl"] == 0.0
    assert progress.steps[0]["grad_norm"] > 0


def test_with_all_weights_trained_the_first_kl_is_exactly_0_too(tmp_path: Path) -> None:
    _, progress = run_small(tmp_path, "train.steps=2", "eval.before=false", "eval.after=false")
    assert progress.steps[0]["kl"] == 0.0 < progress.steps[1]["kl"]


def test_a_copy_of_the_adapter_stands_in_and_the_adapters_own_tensors_come_back() -> None:
    loaded = load_model("tiny", lora=LoraSettings(rank=2))
    assert loaded.adapter is not None
    team = Team()
    team.join(POLICY, loaded.model, Forward.of)
    target = reference.AdapterCopy(team)
    with torch.no_grad():
        for parameter in loaded.adapter.trained.values():
            parameter += 0.5
    moved = loaded.digest()
    fresh = load_model("tiny", lora=LoraSettings(rank=2)).digest()
    with pytest.raises(KeyError), target.forward.within():
        assert loaded.digest() == fresh
        raise KeyError
    assert loaded.digest() == moved
    target.refresh()
    with target.forward.within():
        assert loaded.digest() == moved


def test_only_the_adapter_is_moved_and_saved(straight: Path) -> None:
    base, trained = (build.model(small_recipe(straight.parent, *LORA), f) for f in (None, model_folder(straight, 4)))
    for (name, before), after in zip(base.model.named_parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(before, after) is (".lora_" not in name), name
    saved = {path.name for path in model_folder(straight, 4).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved and "model.safetensors" not in saved


@pytest.mark.parametrize("step", [1, 3])
def test_it_goes_on_to_the_same_bits(step: int, straight: Path, copy: Path) -> None:
    build.resume(copy, step, Silent())
    found = compare(straight, copy)
    assert found.difference == "" and found.counts["weights"] == 28


def test_killed_while_a_checkpoint_is_written_it_goes_on_to_the_same_bits(straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    points = ["checkpoint.model", "checkpoint.sealed"]
    with killable(tmp_path) as server:
        begin = {"recipe": RECIPE, "settings": [f'out="{tmp_path}"', *SAVED]}
        assert server.run("train", **begin, arm=["step.updated", 2])["killed"] == 9
        for point in points:
            assert server.run("resume", folder=str(folder), arm=[point, 1])["killed"] == 9, point
        ended = server.run("resume", folder=str(folder))
        assert ended["code"] == 0, ended
    assert compare(straight, folder).difference == ""


def test_saved_in_the_background_it_is_the_same_and_the_base_is_not_copied(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy as library

    copied: list[type] = []
    deep = library.deepcopy
    monkeypatch.setattr(library, "deepcopy", lambda x, *a: copied.append(type(x)) or deep(x, *a))
    folder, _ = run_small(tmp_path, *SAVED, "checkpoint.background=true")
    assert not any(issubclass(kind, torch.nn.Module) for kind in copied)
    weights = [model_folder(f, 3) / "adapter_model.safetensors" for f in (straight, folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def based_run(tmp_path: Path, *settings: str) -> tuple[Path, Path]:
    """A run on a base folder of its own: the run and the base."""
    base = tmp_path / "base"
    save_model(build.model(small_recipe(tmp_path)), base)
    recipe = {**RECIPE, "model": {"source": str(base)}}
    from gropius.recipe import resolve

    return build.train(resolve(recipe, [f'out="{tmp_path}"', "eval.before=false", *settings]), Silent()), base


def move_base(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(base)


def test_on_a_base_that_was_changed_it_is_refused_by_name(tmp_path: Path) -> None:
    run, base = based_run(tmp_path, *LORA, "train.steps=2", "checkpoint.every=1")
    move_base(base)
    with pytest.raises(ModelError, match="was trained on other weights") as refused:
        build.resume(run, 1, Silent())
    assert str(base) in str(refused.value)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunFolderError, match=r"the weights of model\.source: "):
        build.resume(run, None, Silent())


def test_with_all_weights_trained_a_changed_base_matters_only_where_it_is_read_again(tmp_path: Path) -> None:
    run, base = based_run(tmp_path, "train.steps=2", "checkpoint.every=1")
    move_base(base)
    build.resume(run, 1, Silent())
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunFolderError, match=r"the weights that training starts from: "):
        build.resume(run, None, Silent())


def test_an_adapter_that_was_changed_before_the_first_checkpoint_is_refused(straight: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder(straight, 2), tmp_path / "start")
    run, _ = run_small(tmp_path, f'model.lora.adapter="{tmp_path}/start"', "train.steps=1")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(model_folder(straight, 3), tmp_path / "start", dirs_exist_ok=True)
    with pytest.raises(RunFolderError, match=r"the weights that training starts from: "):
        build.resume(run, None, Silent())


def test_a_fork_of_it_goes_on_with_the_adapter(straight: Path, tmp_path: Path) -> None:
    plan = small_recipe(tmp_path, *LORA, "name=forked", "train.steps=3", "train.epochs=2")
    folder = build.fork(plan, (straight, 2), Silent())
    assert RunReader(folder).checkpoints() == [2, 3]
    whole = small_recipe(tmp_path, "name=whole", "train.steps=9")
    with pytest.raises(RunFolderError, match=r"model\.lora"):
        build.fork(whole, (straight, 2), Silent())


def test_exported_it_is_an_adapter_that_peft_loads_and_merged_a_model_that_transformers_loads(
    straight: Path, tmp_path: Path
) -> None:
    assert "an adapter of tiny" in export(straight, None, tmp_path / "adapter")[-1]
    assert "merged; its logits equal" in export(straight, 4, tmp_path / "whole", merged=True)[-1]
    ids = torch.arange(20, 40)[None]
    base = build.model(small_recipe(tmp_path)).model
    apart = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    ours = build.model(small_recipe(tmp_path, *LORA), model_folder(straight, 4)).model
    with torch.no_grad():
        expected = ours(input_ids=ids).logits
        assert torch.equal(apart(input_ids=ids).logits, expected)
        torch.testing.assert_close(whole(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    cards = [(tmp_path / name / "README.md").read_text() for name in ("adapter", "whole")]
    assert "library_name: peft" in cards[0] and "the adapter alone" in cards[0]
    assert "library_name: transformers" in cards[1] and "merged in" in cards[1]
    assert all(str(RunReader(straight).resolved()["origin"]["base"]) in card for card in cards)


def test_a_merge_whose_logits_are_others_is_refused_and_nothing_to_merge_is_said(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gropius.train import export as room

    honest, calls = room._logits, []

    def drifting(loaded: Any) -> torch.Tensor:
        calls.append(1)
        return honest(loaded) * (1.0 + 1e-3 * (len(calls) - 1))

    monkeypatch.setattr(room, "_logits", drifting)
    with pytest.raises(RunFolderError, match="logits of the merged model differ"):
        export(straight, None, tmp_path / "out", merged=True)
    assert not (tmp_path / "out").exists()
    plain, _ = run_small(tmp_path, "train.steps=1")
    with pytest.raises(UsageError, match="no adapter to merge"):
        export(plain, None, tmp_path / "out", merged=True)


def test_a_logged_loss_is_taken_apart_to_its_tokens(straight: Path) -> None:
    from gropius.objective.explain import explain

    plan = small_recipe(straight.parent, *LORA)
    reports = [explain(one, plan.objective) for one in batches(RunReader(straight).rollouts(3))]
    logged = RunReader(straight).metrics_by_step()[3]["loss"]
    assert abs(sum(r["loss"] for r in reports) / len(reports) - logged) <= 1e-6 * max(1.0, abs(logged))


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int), said
    return ended.value.code, said.out + said.err


def recipe_file(folder: Path) -> Path:
    pattern = json.dumps(RECIPE["reward"][0]["options"]["pattern"])
    path = folder / "tiny-lora.toml"
    path.write_text(
        'name = "tiny-lora"\nseed = 3\n[model.tiny]\nhidden = 32\nlayers = 2\nheads = 2\nkv_heads = 2\nmlp = 64\n'
        '[model.lora]\nrank = 4\n[data]\nsource = "arithmetic"\noptions = { digits = 1, rows = [60, 8] }\n'
        f'[[reward]]\nname = "format"\noptions = {{ pattern = {pattern} }}\n'
        "[rollout]\nprompts = 4\ngroup_size = 4\nmax_tokens = 4\n[train]\nsteps = 2\nthreads = 1\n"
        "[eval]\ntasks = 4\n[sft]\nsteps = 2\nbatch = 4\n"
    )
    return path


def test_every_verb_takes_a_recipe_and_a_run_with_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(recipe_file(tmp_path))
    lines: Sequence[tuple[Sequence[str], str]] = [
        (("resolve", recipe), "rank"),
        (("train", recipe, "--out", "runs"), "LoRA of rank 4"),
        (("eval", "runs/tiny-lora"), "held-out"),
        (("play", "runs/tiny-lora", "--watch"), "reward"),
        (("explain", "runs/tiny-lora"), "recomputed"),
        (("export", "runs/tiny-lora", "out"), "loaded again and equal"),
        (("export", "runs/tiny-lora@2", "whole", "--merged"), "merged"),
        (("sft", recipe, "--out", "runs", "--name", "warm"), "warm start"),
        (("eval", "runs/warm"), "held-out"),
        (("train", recipe, "--out", "runs", "--name", "next", "--set", 'model.lora.adapter="runs/warm/model"',
          "--set", "model.lora.rank=0"), "LoRA of rank 4"),
        (("check", recipe, "--invariance"), "relative difference"),
    ]  # fmt: skip
    for words, expected in lines:
        code, said = call(capsys, *words)
        assert code == 0 and expected in said, (words, said)


def test_keys_that_an_adapter_says_itself_and_dropout_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(recipe_file(tmp_path))
    code, said = call(capsys, "resolve", recipe, "--set", "model.lora.dropout=0.1")
    assert code == 2 and "write dropout = 0" in said
    code, said = call(capsys, "resolve", recipe, "--set", "model.lora.adapter=x")
    assert code == 2 and "model.lora.rank" in said and "would do nothing" in said
    code, said = call(capsys, "resolve", recipe, "--set", "model.lora_alpha=8")
    assert code == 2 and "model.lora.alpha" in said
