"""Relations between the keys of a recipe: what contradicts, and what would do nothing. No torch.

Each rule is one row: the key that is to blame, when it is broken, and what to write instead. A key that would do
nothing is refused only when a person wrote it with another value than its default: `--set` can always switch it off.
"""

from __future__ import annotations

from collections.abc import Iterator

from gropius.naming import names_a_function
from gropius.recipe import rules_cluster, rules_credit
from gropius.recipe.draft import MISMATCH_BOUND as MISMATCH_BOUND
from gropius.recipe.draft import Contradiction as Contradiction
from gropius.recipe.draft import Draft as Draft
from gropius.recipe.draft import Effect as Effect
from gropius.recipe.draft import divisor
from gropius.recipe.fields import Table
from gropius.recipe.schema import TABLES, Recipe


def broken_rules(draft: Draft) -> Iterator[tuple[str, str]]:
    """Every broken rule as (key, message), contradictions first."""
    for rule in CONTRADICTIONS:
        if rule.broken(draft):
            yield rule.key, rule.message(draft)
    for effect in EFFECTS:
        if effect.effective(draft):
            continue
        for key in sorted(draft.explicit):
            matches = key.startswith(effect.key) if effect.key.endswith(".") else key == effect.key
            if matches and not _is_default(draft.recipe, key):
                yield key, f"would do nothing: it needs {effect.needs}; remove it or set that"
    yield from _reward_rules(draft.recipe)
    yield from group_schedule_rules(draft)


def _is_default(recipe: Recipe, key: str) -> bool:
    *path, name = key.split(".")
    table: Table = recipe
    for part in path:
        table = getattr(table, part)
    return bool(getattr(table, name) == TABLES[tuple(path)].model_fields[name].default)


def _reward_rules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for index, part in enumerate(recipe.reward):
        if part.weight == 0:
            yield f"reward.{index}.weight", "a part of weight 0 does nothing; remove it, or give it a weight"
        if any(part.name == other.name and part.options == other.options for other in recipe.reward[:index]):
            yield f"reward.{index}.name", "is listed twice with the same options; keep one and set its weight"


def group_schedule_rules(draft: Draft) -> Iterator[tuple[str, str]]:
    """Sizes that a step's responses divide into, with whole updates, and one way of going through them."""
    schedule, rollout = draft.recipe.rollout.group_schedule, draft.recipe.rollout
    key, sizes = "rollout.group_schedule", schedule.sizes
    if not sizes:
        if schedule.steps or schedule.dead_share:
            yield f"{key}.sizes", f"is missing; write sizes = [{rollout.group_size}, …] or leave the schedule out"
        return
    if sizes[0] != rollout.group_size or len(sizes) < 2 or len(set(sizes)) < len(sizes):
        yield f"{key}.sizes", f"begins with rollout.group_size = {rollout.group_size} and names at least two, each once"
    for size in sizes:
        prompts, rest = divmod(draft.responses, size)
        if rest or prompts % draft.recipe.train.updates:
            yield (
                f"{key}.sizes",
                f"{draft.responses} responses of a step are no whole number of groups of {size} for each of "
                f"{draft.recipe.train.updates} updates; write {divisor(draft.responses, size)}, or other prompts",
            )
    if min(sizes) == 1 and draft.compares_siblings:
        yield f"{key}.sizes", "one response has no sibling to be compared with; write at least 2"
    if bool(schedule.steps) == (schedule.dead_share is not None):
        yield key, "goes by steps or by dead_share: write one of the two"
    if schedule.steps and (len(schedule.steps) != len(sizes) - 1 or list(schedule.steps) != sorted({*schedule.steps})):
        yield f"{key}.steps", f"name the step that each of the {len(sizes) - 1} further sizes begins at, ascending"
    if schedule.dead_share is not None and schedule.dead_share[0] >= schedule.dead_share[1]:
        yield f"{key}.dead_share", "write [low, high] with low below high, for example [0.2, 0.6]"


def _updates(draft: Draft) -> str:
    prompts, updates = draft.recipe.rollout.prompts, draft.recipe.train.updates
    return (
        f"{prompts} prompts do not divide into {updates} updates, and a group is never divided; "
        f"write updates = {divisor(prompts, updates)}, or prompts = {updates * max(1, round(prompts / updates))}"
    )


def _tiny_head(draft: Draft) -> str:
    tiny = draft.recipe.model.tiny
    width = max(2, 2 * round(tiny.hidden / tiny.heads / 2))
    return (
        f"hidden = {tiny.hidden} does not divide into {tiny.heads} heads of an even width; "
        f"write hidden = {width * tiny.heads}"
    )


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction("train.updates", lambda d: d.recipe.rollout.prompts % d.recipe.train.updates != 0, _updates),
    Contradiction(
        "rollout.group_size",
        lambda d: d.recipe.rollout.group_size == 1 and d.compares_siblings,
        lambda d: (
            "one response has no sibling to be compared with, so every advantage is 0; write group_size = 8, or "
            'objective.advantage.baseline = "batch_mean" with objective.advantage.scale = "batch_std" or "none"'
        ),
    ),
    Contradiction(
        "rollout.temperature",
        lambda d: d.recipe.rollout.temperature == 0,
        lambda d: (
            "temperature 0 draws the same response for every sibling, and equal siblings carry no signal; "
            "write temperature = 1.0 (a greedy evaluation is eval.temperature = 0)"
        ),
    ),
    Contradiction(
        "rollout.max_episode_tokens",
        lambda d: d.episode_tokens < d.recipe.rollout.max_tokens,
        lambda d: (
            f"{d.episode_tokens} is less than one turn's max_tokens = {d.recipe.rollout.max_tokens}; "
            f"write max_tokens = {d.episode_tokens} or raise this"
        ),
    ),
    Contradiction(
        "rollout.token_budget",
        lambda d: (d.recipe.rollout.token_budget or d.episode_tokens) < d.episode_tokens,
        lambda d: (
            f"not even one response of {d.episode_tokens} tokens fits in the engine's cache; "
            f"write at least {2 * d.episode_tokens}"
        ),
    ),
    Contradiction(
        "rollout.grow_limit",
        lambda d: (
            d.objective.selection.dead == "grow"
            and d.recipe.rollout.grow_limit is not None
            and d.recipe.rollout.grow_limit
            <= max(d.recipe.rollout.group_size, *d.recipe.rollout.group_schedule.sizes, 0)
        ),
        lambda d: (
            f"a grown group has more than group_size = {d.recipe.rollout.group_size} siblings; "
            f"write grow_limit = {4 * d.recipe.rollout.group_size}"
        ),
    ),
    Contradiction(
        "rollout.oversample",
        lambda d: (
            d.recipe.rollout.oversample > 1
            and (d.objective.selection.dead == "grow" or d.objective.advantage.baseline == "greedy")
        ),
        lambda d: (
            "a group that grows, or has a greedy baseline, is complete only when nothing more is drawn for it, so "
            'there is no early stop; write oversample = 1.0, or objective.selection.dead = "refill"'
        ),
    ),
    Contradiction(
        "rollout.tools.functions",
        lambda d: bool(d.recipe.rollout.tools.functions) and d.recipe.rollout.max_turns == 1,
        lambda d: (
            "in one turn no call can be answered; write "
            f"rollout.max_turns = {d.recipe.rollout.tools.calls + 2} (every call, a warning, the answer)"
        ),
    ),
    Contradiction(
        "rollout.tools.pattern",
        lambda d: (d.recipe.rollout.tools.format == "pattern") != bool(d.recipe.rollout.tools.pattern),
        lambda d: 'belongs to format = "pattern", and that needs it; write both or neither',
    ),
    Contradiction(
        "rollout.cut",
        lambda d: d.recipe.rollout.cut == "resume" and bool(d.recipe.rollout.stop_strings),
        lambda d: (
            'a stop string may lie across the cut, where nobody would see it; write cut = "abort", or stop_strings = []'
        ),
    ),
    Contradiction(
        "objective.selection.overlong_max",
        lambda d: (
            d.objective.selection.truncated == "soft_penalty"
            and d.objective.selection.overlong_max - d.objective.selection.overlong_cache >= d.episode_tokens
        ),
        lambda d: (
            f"the penalty starts beyond the {d.episode_tokens} tokens that a response may have; "
            f"write overlong_max = {d.episode_tokens} and overlong_cache = {max(1, d.episode_tokens // 5)}"
        ),
    ),
    *rules_credit.CONTRADICTIONS,
    Contradiction(
        "model.tiny.hidden",
        lambda d: d.recipe.model.tiny.hidden % (2 * d.recipe.model.tiny.heads) != 0,
        _tiny_head,
    ),
    Contradiction(
        "model.tiny.kv_heads",
        lambda d: d.recipe.model.tiny.heads % d.recipe.model.tiny.kv_heads != 0,
        lambda d: (
            f"heads = {d.recipe.model.tiny.heads} do not divide into kv_heads = {d.recipe.model.tiny.kv_heads}; "
            f"write kv_heads = {divisor(d.recipe.model.tiny.heads, d.recipe.model.tiny.kv_heads)}"
        ),
    ),
    Contradiction(
        "model.tiny.context",
        lambda d: d.recipe.model.source == "tiny" and d.episode_tokens >= d.recipe.model.tiny.context,
        lambda d: (
            f"a response of {d.episode_tokens} tokens leaves no room for a prompt in a context of "
            f"{d.recipe.model.tiny.context}; write context = {2 * d.episode_tokens}, or a smaller rollout.max_tokens"
        ),
    ),
    Contradiction(
        "model.lora.dropout",
        lambda d: d.recipe.model.lora.dropout > 0,
        lambda d: (
            "a policy that drops units gives other log-probabilities than its sampler did, and no ratio is right; "
            "write dropout = 0"
        ),
    ),
    Contradiction(
        "eval.tasks",
        lambda d: d.recipe.data.held_out is not None and d.recipe.eval.tasks > d.recipe.data.held_out > 0,
        lambda d: (
            f"{d.recipe.eval.tasks} tasks are more than the {d.recipe.data.held_out} held out; "
            f"write tasks = {d.recipe.data.held_out}, or 0 for all, or raise data.held_out"
        ),
    ),
    *rules_cluster.CONTRADICTIONS,
    Contradiction(
        "data.held_out",
        lambda d: (
            d.recipe.data.held_out == 0 and bool(d.recipe.eval.every or d.recipe.eval.before or d.recipe.eval.after)
        ),
        lambda d: (
            "nothing is held out to evaluate on; write held_out = 100, or eval.before = false, "
            "eval.after = false and eval.every = 0"
        ),
    ),
)


def _no_adapter_given(draft: Draft) -> bool:
    return not draft.recipe.model.lora.adapter


ADAPTER_KEYS = ("rank", "alpha", "target_modules", "bias", "init")  # what a trained adapter says itself

EFFECTS: tuple[Effect, ...] = (
    Effect("rollout.vllm.", lambda d: d.recipe.rollout.engine == "vllm", 'rollout.engine = "vllm"'),
    Effect(
        "rollout.token_budget",
        lambda d: d.recipe.rollout.engine == "torch",
        'rollout.engine = "torch" (vLLM\'s cache is rollout.vllm.kv_cache_gib)',
    ),
    Effect("rollout.vllm.address", lambda d: d.recipe.rollout.vllm.mode == "server", 'rollout.vllm.mode = "server"'),
    Effect("rollout.vllm.lora", lambda d: d.recipe.model.lora.on, "model.lora.rank above 0, or a model.lora.adapter"),
    Effect(
        "rollout.vllm.python",
        lambda d: not d.recipe.rollout.vllm.address,
        "a worker to start, and rollout.vllm.address names one that runs",
    ),
    Effect(
        "rollout.vllm.devices",
        lambda d: d.recipe.rollout.vllm.mode == "server" and not d.recipe.rollout.vllm.address,
        'rollout.vllm.mode = "server" and no rollout.vllm.address',
    ),
    *(
        Effect(f"model.lora.{key}", _no_adapter_given, "a fresh adapter, and model.lora.adapter brings its own")
        for key in ADAPTER_KEYS
    ),
    Effect(
        "model.lora.",
        lambda d: d.recipe.model.lora.on or "model.lora.rank" in d.explicit,
        "model.lora.rank above 0, or a model.lora.adapter",
    ),
    Effect("model.head_dtype", lambda d: d.recipe.model.dtype != "float32", 'model.dtype = "bfloat16"'),
    Effect("model.tiny.", lambda d: d.recipe.model.source == "tiny", 'model.source = "tiny"'),
    Effect(
        "rollout.max_episode_tokens",
        lambda d: d.recipe.rollout.max_turns > 1 or d.episode_tokens == d.recipe.rollout.max_tokens,
        "rollout.max_turns above 1 (with one turn, rollout.max_tokens is the bound)",
    ),
    Effect(
        "rollout.refill_attempts",
        lambda d: d.objective.selection.dead == "refill",
        'objective.selection.dead = "refill"',
    ),
    Effect(
        "rollout.tools.",
        lambda d: bool(d.recipe.rollout.tools.functions) or "rollout.tools.functions" in d.explicit,
        "rollout.tools.functions",
    ),
    Effect("rollout.cut", lambda d: d.recipe.rollout.oversample > 1, "rollout.oversample above 1"),
    Effect(
        "rollout.group_schedule.window",
        lambda d: d.recipe.rollout.group_schedule.dead_share is not None,
        "rollout.group_schedule.dead_share",
    ),
    Effect("rollout.grow_limit", lambda d: d.objective.selection.dead == "grow", 'objective.selection.dead = "grow"'),
    Effect(
        "train.reference_refresh",
        lambda d: d.objective.needs_reference,
        "a reference, and without a KL term (objective.kl.estimator) there is none",
    ),
    Effect(
        "train.final_ratio", lambda d: d.recipe.train.schedule != "constant", 'train.schedule = "linear" or "cosine"'
    ),
    Effect("sft.final_ratio", lambda d: d.recipe.sft.schedule != "constant", 'sft.schedule = "linear" or "cosine"'),
    Effect("sft.", lambda d: d.recipe.sft.steps > 0 or "sft.steps" in d.explicit, "sft.steps above 0"),
    Effect(
        "reward_pool.",
        lambda d: any(names_a_function(part.name) for part in d.recipe.reward),
        'a [[reward]] of your own ("module:function"); built-in rewards need no pool',
    ),
    *rules_cluster.EFFECTS,
    *rules_credit.EFFECTS,
    Effect("checkpoint.keep_last", lambda d: d.recipe.checkpoint.every > 0, "checkpoint.every above 0"),
    Effect("checkpoint.keep_every", lambda d: d.recipe.checkpoint.every > 0, "checkpoint.every above 0"),
    Effect("checkpoint.best", lambda d: d.recipe.eval.every > 0, "eval.every above 0"),
)
