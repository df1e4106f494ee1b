"""OpenRLHF at 3c3be623 (2026-08-13, 0.11.0), train_ppo_ray: what its flags make of the objective, and where. No torch.

loss: openrlhf/models/loss.py, lu: openrlhf/utils/loss_utils.py, exp: openrlhf/trainer/ppo_utils/experience_maker.py,
gen: openrlhf/trainer/ppo_utils/samples_generator.py, act: openrlhf/trainer/ray/ppo_actor.py,
mu: openrlhf/models/utils.py, cli: openrlhf/cli/train_ppo_ray.py; line numbers after the colon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gropius.audit.dialect import Caveat, Dialect, Option, Parsed, Rule, Units, Values, always, unused
from gropius.audit.sources import command_line, flat, split_interpolations, structured, words

EST, KL, IS = "algo.advantage.estimator", "algo.kl.", "algo.advantage.is_correction_"
GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")

OPTIONS: dict[str, Option] = {
    EST: Option("gae", ("gae", "reinforce", *GROUPED)),
    "algo.advantage.no_std_norm": Option(False, (True, False)),
    "algo.advantage.gamma": Option(1.0),
    "algo.advantage.lambd": Option(1.0),
    IS + "enable": Option(False, (True, False)),
    IS + "threshold": Option([0.5, 5.0], numbers=2),
    IS + "type": Option("tis", ("tis", "icepop", "seq-mask-tis")),
    KL + "init_coef": Option(0.01),
    KL + "estimator": Option("k1", ("k1", "k2", "k3")),
    KL + "use_loss": Option(False, (True, False)),
    KL + "target": Option(None),
    KL + "horizon": Option(10000),
    "algo.dynamic_filtering_enable": Option(False, (True, False)),
    "algo.dynamic_filtering_range": Option([0.0, 1.0], numbers=2),
    "actor.policy_loss_type": Option("ppo", ("ppo", "gspo")),
    "actor.eps_clip": Option(0.2),
    "actor.eps_clip_low_high": Option(None, kind="list", numbers=2),
    "actor.dual_clip": Option(None),
    "actor.entropy_coef": Option(None),
    "actor.aux_loss_coef": Option(0.0),
    "actor.adam.lr": Option(1e-6),
    "actor.adam.eps": Option(1e-8),
    "actor.adam.weight_decay": Option(0.0),
    "actor.max_norm": Option(1.0),
    "actor.lr_scheduler": Option("cosine_with_min_lr"),
    "actor.min_lr_ratio": Option(0.1),
    "critic.value_clip": Option(0.5),
    "reward.clip_range": Option([-10.0, 10.0], numbers=2),
    "reward.normalize_enable": Option(False, (True, False)),
    "reward.overlong_buffer_len": Option(None),
    "reward.overlong_penalty_factor": Option(1.0),
    "reward.stop_properly_penalty_coef": Option(None),
    "rollout.n_samples_per_prompt": Option(1, least=1),
    "rollout.batch_size": Option(1024, least=1),
    "rollout.max_new_tokens": Option(None, least=1),
    "rollout.temperature": Option(1.0),
    "rollout.top_p": Option(1.0),
    "train.batch_size": Option(128, least=1),
    "train.micro_batch_size": Option(1, least=1),
    "train.max_epochs": Option(1, least=1),
    "train.dynamic_batch_enable": Option(False, (True, False)),
    "data.max_len": Option(2048, least=1),
    "actor.num_nodes": Option(1, least=1),
    "actor.num_gpus_per_node": Option(8, least=1),
}
# The flags of releases before 0.10, without dots.
_OLD = {
    "advantage_estimator": EST, "init_kl_coef": KL + "init_coef", "kl_estimator": KL + "estimator",
    "use_kl_loss": KL + "use_loss", "kl_target": KL + "target", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "rollout_batch_size": "rollout.batch_size", "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size", "max_epochs": "train.max_epochs", "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high", "dual_clip": "actor.dual_clip",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature", "top_p": "rollout.top_p", "policy_loss_type": "actor.policy_loss_type",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "no_advantage_std_norm": "algo.advantage.no_std_norm", "entropy_loss_coef": "actor.entropy_coef",
    "overlong_buffer_len": "reward.overlong_buffer_len", "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "enable_vllm_is_correction": IS + "enable", "gamma": "algo.advantage.gamma", "lambd": "algo.advantage.lambd",
    "actor_learning_rate": "actor.adam.lr", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
}  # fmt: skip


def _is(*names: str) -> Any:
    return lambda v: v[EST] in names


def _bounds(v: Values) -> tuple[float, float]:
    """Low and high clip (cli:592-593)."""
    pair = v["actor.eps_clip_low_high"] or [v["actor.eps_clip"]] * 2
    return float(pair[0]), float(pair[1])


def _gspo(v: Values) -> bool:
    return bool(v["actor.policy_loss_type"] == "gspo")


def _tokens(v: Values) -> int:
    return int(v["rollout.max_new_tokens"] or v["data.max_len"])


def _kl_off(v: Values) -> bool:
    return bool(v[KL + "init_coef"] <= 0)


def _kl(v: Values, place: str) -> Mapping[str, Any]:
    return {
        "kl.estimator": v[KL + "estimator"], "kl.place": place, "kl.coefficient": float(v[KL + "init_coef"]),
        "kl.reward_form": "to_go", "kl.gradient": "direct", "kl.clamp": 10.0 if v[KL + "estimator"] == "k1" else 0.0,
    }  # fmt: skip


_WHITE = {"advantage.scale": "none", "advantage.whiten": "tokens", "advantage.ddof": 0}

RULES: tuple[Rule, ...] = (
    Rule("advantage", "exp:270", _is("group_norm"),
         {"advantage.baseline": "group_mean", "advantage.scale": "group_std", "advantage.ddof": 1,
         "advantage.epsilon": 1e-9},
         "centred on the group's mean, divided by the group's sample std (ddof 1) + 1e-9"),
    Rule("advantage", "exp:268", _is("dr_grpo"), {"advantage.baseline": "group_mean", "advantage.scale": "none"},
         "centred on the group's mean, not scaled"),
    Rule("advantage", "exp:264-266", _is("rloo"), {"advantage.baseline": "leave_one_out", "advantage.scale": "none"},
         "minus the mean of the other responses"),
    Rule("advantage", "exp:268, exp:315-328", _is("reinforce_baseline"), {"advantage.baseline": "group_mean", **_WHITE},
         "centred on the group's mean, then whitened over the batch's tokens (population variance, at least 1e-8)"),
    Rule("advantage", "exp:292-307, exp:315-328", _is("reinforce"), {"advantage.baseline": "none", **_WHITE},
         "the return to go, whitened over the batch's tokens (population variance, at least 1e-8)"),
    Rule("ratio", "loss:156-160", lambda v: not _gspo(v), {"ratio.level": "token", "ratio.anchor": "snapshot"},
         "one ratio a token, log-ratio clamped to ±20"),
    Rule("ratio", "loss:161-168", _gspo,
         lambda v: {"ratio.level": "sequence", "ratio.anchor": "sampler" if v[IS + "enable"] else "snapshot"},
         lambda v: "one ratio a response, the geometric mean of its token ratios, to "
         + ("the sampler" if v[IS + "enable"] else "the policy before the update")),
    Rule("ratio", "loss:187-209", lambda v: v[IS + "enable"] and not _gspo(v) and v[IS + "type"] != "seq-mask-tis",
         lambda v: {"ratio.correction": "mask" if v[IS + "type"] == "icepop" else "truncate",
                    "ratio.correction_low": float(v[IS + "threshold"][0]),
                    "ratio.correction_high": float(v[IS + "threshold"][1])},
         lambda v: f"policy term times anchor over sampler per token, {v[IS + 'type']}, {v[IS + 'threshold']}"),
    Rule("surrogate", "loss:172-184", always,
         lambda v: {"surrogate.kind": "clip", "surrogate.low": _bounds(v)[0], "surrogate.high": _bounds(v)[1],
                    "surrogate.dual": float(v["actor.dual_clip"] or 0)},
         lambda v: f"clip to [1 - {_bounds(v)[0]:g}, 1 + {_bounds(v)[1]:g}]"
         + (f", dual clip c = {v['actor.dual_clip']:g}" if v["actor.dual_clip"] else ", no dual clip")),
    Rule("kl", "cli init_coef", _kl_off, {"kl.estimator": "none"}, "none"),
    Rule("kl", "act:319-337, mu compute_approx_kl", lambda v: bool(v[KL + "use_loss"]) and not _kl_off(v),
         lambda v: _kl(v, "loss"),
         lambda v: f"{v[KL + 'estimator']} in the loss, coefficient {v[KL + 'init_coef']:g}, a token mean, "
         f"value clamped to ±10"),
    Rule("kl", "exp:205-213, exp:274-282", lambda v: not v[KL + "use_loss"] and not _kl_off(v),
         lambda v: _kl(v, "reward"),
         lambda v: f"{v[KL + 'estimator']} of the anchor in the reward (on by default), coefficient "
         f"{v[KL + 'init_coef']:g}, summed "
         "from each token to the end, after the group's baseline and scale, value clamped to ±10"),
    Rule("aggregate", "loss:29-32, lu:57-86", lambda v: not _gspo(v), {"aggregate.kind": "token_mean"},
         "token sum over the loss tokens of the optimiser step, all ranks: holds across micro-batches and ranks"),
    Rule("aggregate", "loss:34-40, loss:137", _gspo, {"aggregate.kind": "response_mean"},
         "mean over non-empty responses of token means: holds across micro-batches and ranks"),
    Rule("selection", "gen:169-186", lambda v: bool(v["algo.dynamic_filtering_enable"]), {"selection.dead": "refill"},
         lambda v: f"a group is kept when its mean score lies strictly inside "
         f"{v['algo.dynamic_filtering_range']}, replaced one for one "
         "otherwise"),
    Rule("selection", "exp:238-330", lambda v: not v["algo.dynamic_filtering_enable"], {"selection.dead": "keep"},
         "groups of equal rewards are kept and counted in every denominator"),
    Rule("selection", "length_penalty:16-55", lambda v: v["reward.overlong_buffer_len"] is not None,
         lambda v: {"selection.truncated": "soft_penalty", "selection.overlong_max": _tokens(v),
                    "selection.overlong_cache": int(v["reward.overlong_buffer_len"])},
         lambda v: f"a penalty growing to -{v['reward.overlong_penalty_factor']:g} over the last "
         f"{v['reward.overlong_buffer_len']:g} "
         "tokens, in the reward"),
)  # fmt: skip


def _uneven(v: Values) -> bool:
    return bool((int(v["rollout.batch_size"]) * int(v["rollout.n_samples_per_prompt"])) % int(v["train.batch_size"]))


CAVEATS: tuple[Caveat, ...] = (
    Caveat("inexpressible", "exp:284-291", _is("gae"),
           "estimator gae (the default): a critic with GAE, whitened; a group-relative objective has none", (EST,),
           True),
    Caveat("inexpressible", "exp:321-325",
           lambda v: v[EST] in ("reinforce", "reinforce_baseline") and v["algo.advantage.no_std_norm"],
           "centring over the batch's tokens without scaling", ("algo.advantage.no_std_norm",), True),
    Caveat("inexpressible", "loss:196-204",
           lambda v: v[IS + "enable"] and not _gspo(v) and v[IS + "type"] == "seq-mask-tis",
           "seq-mask-tis: a geometric mask times an unbounded token weight", (IS + "type",)),
    Caveat("inexpressible", "act:330", lambda v: _gspo(v) and bool(v[KL + "use_loss"]) and not _kl_off(v),
           "the KL stays a token mean while the policy term is a mean over responses", (KL + "use_loss",)),
    Caveat("inexpressible", "cli kl.target", lambda v: v[KL + "target"] is not None,
           "a coefficient that adapts to a target",
           (KL + "target",)),
    Caveat("inexpressible", "act:345-352", lambda v: bool(v["actor.entropy_coef"]), "an entropy bonus",
           ("actor.entropy_coef",)),
    Caveat("inexpressible", "act:339-343", lambda v: bool(v["actor.aux_loss_coef"]), "a load-balancing loss",
           ("actor.aux_loss_coef",)),
    Caveat("inexpressible", "exp:384-400", lambda v: v[EST] == "reinforce" and v["algo.advantage.gamma"] != 1,
           "a discount other than 1", ("algo.advantage.gamma",)),
    Caveat("inexpressible", "length_penalty:50-55",
           lambda v: v["reward.overlong_buffer_len"] is not None and v["reward.overlong_penalty_factor"] != 1,
           "an overlong penalty whose largest value is not 1", ("reward.overlong_penalty_factor",)),
    Caveat("inexpressible", "length_penalty", lambda v: v["reward.stop_properly_penalty_coef"] is not None,
           "a reward scaled or overridden where a response was cut", ("reward.stop_properly_penalty_coef",)),
    Caveat("inexpressible", "cli reward.normalize_enable", lambda v: bool(v["reward.normalize_enable"]),
           "running normalisation of a reward model's scores", ("reward.normalize_enable",)),
    Caveat("contradiction", "cli:607-616", lambda v: v[EST] in GROUPED and v["rollout.n_samples_per_prompt"] < 2,
           "this estimator needs n_samples_per_prompt > 1; upstream refuses it", ("rollout.n_samples_per_prompt",)),
    Caveat("contradiction", "cli:700-706",
           lambda v: bool(v["algo.dynamic_filtering_enable"]) and v["rollout.n_samples_per_prompt"] < 2,
           "dynamic filtering needs n_samples_per_prompt > 1; upstream refuses it", ("algo.dynamic_filtering_enable",)),
    Caveat("contradiction", "cli:680-683",
           lambda v: bool(v[KL + "use_loss"]) and v[KL + "estimator"] == "k1" and not _kl_off(v),
           "k1 as a loss has an expected gradient of 0: it ties the policy to nothing",
           (KL + "estimator", KL + "use_loss")),
    Caveat("trap", "exp:274-282", lambda v: not v.wrote(KL + "init_coef") and not _kl_off(v),
           "a KL of 0.01 is on though nothing asks for it; --algo.kl.init_coef 0 switches it off", (KL + "init_coef",)),
    Caveat("trap", "exp:268", _is("dr_grpo"),
           "dr_grpo only removes the std: the loss stays a token mean, not a constant length", (EST,)),
    Caveat("trap", "gen:172", lambda v: bool(v["algo.dynamic_filtering_enable"]),
           "the filter looks at the mean, not at the spread: a group of equal scores inside the range stays",
           ("algo.dynamic_filtering_enable",)),
    Caveat("trap", "exp:319-323", _is("reinforce", "reinforce_baseline"),
           "whitening over tokens: long responses weigh more in the mean and the std", (EST,)),
    Caveat("trap", "loss:161-168", lambda v: _gspo(v) and _bounds(v)[1] > 0.01,
           "a clip this wide never binds on a sequence ratio; the paper uses 3e-4 and 4e-4", ("actor.eps_clip",)),
    Caveat("trap", "lu:57-86", _uneven,
           "rollout.batch_size x n is not a multiple of train.batch_size: the last step is short",
           ("train.batch_size",)),
    Caveat("condition", "mu compute_reward", always,
           lambda v: f"the reward is clamped to {v['reward.clip_range']} after baseline and scale; equal while "
           f"no advantage is larger"),
    Caveat("condition", "mu compute_approx_kl", lambda v: v[KL + "estimator"] != "k1" and not _kl_off(v),
           "equal while no token's KL estimate exceeds 10"),
    *unused("cli:592", ["actor.eps_clip"], "eps_clip_low_high to be absent",
            lambda v: v["actor.eps_clip_low_high"] is not None),
    *unused("exp:315", ["algo.advantage.no_std_norm"], "estimator gae, reinforce or reinforce_baseline",
            lambda v: v[EST] in ("rloo", "group_norm", "dr_grpo")),
    *unused("exp:293-300", ["algo.advantage.gamma"], "estimator gae or reinforce", _is(*GROUPED)),
    *unused("exp:284", ["algo.advantage.lambd", "critic.value_clip"], "estimator gae", lambda v: v[EST] != "gae"),
    *unused("act:319", [KL + "estimator", KL + "use_loss"], "a positive init_coef", _kl_off),
    *unused("cli kl.horizon", [KL + "horizon"], "kl.target", lambda v: v[KL + "target"] is None),
    *unused("loss:187", [IS + "threshold", IS + "type"], "is_correction_enable", lambda v: not v[IS + "enable"]),
    *unused("loss:187", [IS + "threshold", IS + "type"], "policy_loss_type ppo",
            lambda v: v[IS + "enable"] and _gspo(v)),
    *unused("gen:169", ["algo.dynamic_filtering_range"], "dynamic_filtering_enable",
            lambda v: not v["algo.dynamic_filtering_enable"]),
    *unused("length_penalty", ["reward.overlong_penalty_factor"], "overlong_buffer_len",
            lambda v: v["reward.overlong_buffer_len"] is None),
)  # fmt: skip


def parse(text: str, suffix: str) -> Parsed:
    """A command line or a shell script; YAML or JSON of the same names, nested or dotted."""
    table = structured(text, suffix)
    parsed = split_interpolations(flat(table)) if table is not None else command_line(words(text))
    return Parsed(
        {_OLD.get(k, k): x for k, x in parsed.given.items()}, {_OLD.get(k, k): x for k, x in parsed.unread.items()}
    )


def units(v: Values) -> Units:
    """rollout.batch_size counts prompts; train.batch_size responses of all ranks; micro_batch_size those of one."""
    prompts, n, batch = int(v["rollout.batch_size"]), int(v["rollout.n_samples_per_prompt"]), int(v["train.batch_size"])
    ranks = int(v["actor.num_nodes"]) * int(v["actor.num_gpus_per_node"])
    micro = 0 if v["train.dynamic_batch_enable"] else int(v["train.micro_batch_size"])
    return Units(
        prompts, n, float(batch), micro, ranks, prompts * n / batch, int(v["train.max_epochs"]),
        (
            f"rollout.batch_size = {prompts} prompts x n_samples_per_prompt = {n} = {prompts * n} responses",
            f"train.batch_size = {batch} responses an optimiser step, all ranks",
            "micro-batches are cut by tokens" if not micro else f"train.micro_batch_size = {micro} responses of "
            f"one of {ranks} devices",
        ),
    )  # fmt: skip


def run(v: Values) -> dict[str, Any]:
    """Recipe keys beyond the objective."""
    schedules = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"}
    schedule = schedules.get(str(v["actor.lr_scheduler"]), "constant")
    return {
        "rollout.max_tokens": _tokens(v), "rollout.temperature": float(v["rollout.temperature"]),
        "rollout.top_p": float(v["rollout.top_p"]), "train.learning_rate": float(v["actor.adam.lr"]),
        "train.adam_epsilon": float(v["actor.adam.eps"]), "train.weight_decay": float(v["actor.adam.weight_decay"]),
        "train.grad_clip": float(v["actor.max_norm"]), "train.beta2": 0.95,
        "train.schedule": schedule,
        "train.final_ratio": float(v["actor.min_lr_ratio"]) if v["actor.lr_scheduler"] == "cosine_with_min_lr" else 0.0,
    }  # fmt: skip


DIALECT = Dialect(
    "openrlhf", "OpenRLHF", "0.11.0 at 3c3be623 (2026-08-13)",
    {"loss": "openrlhf/models/loss.py", "lu": "openrlhf/utils/loss_utils.py",
     "exp": "openrlhf/trainer/ppo_utils/experience_maker.py", "gen": "openrlhf/trainer/ppo_utils/samples_generator.py",
     "length_penalty": "openrlhf/trainer/ppo_utils/length_penalty.py", "act": "openrlhf/trainer/ray/ppo_actor.py",
     "mu": "openrlhf/models/utils.py", "cli": "openrlhf/cli/train_ppo_ray.py"},
    OPTIONS, RULES, CAVEATS, parse, units, run,
)  # fmt: skip
