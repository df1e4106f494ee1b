"""How a refused key is worded: the place, what is wrong, what to write instead. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from gropius.errors import did_you_mean
from gropius.recipe.schema import TABLES, table_of

KeyPath = tuple[str | int, ...]

# What other trainers call it → our key. Consulted when a key is unknown.
ELSEWHERE: dict[str, str] = {
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "max_grad_norm": "train.grad_clip",
    "lr_scheduler_type": "train.schedule",
    "num_iterations": "train.epochs",
    "ppo_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.pack_tokens",
    "per_device_train_batch_size": "train.pack_tokens",
    "mini_batch_size": "train.updates",
    "batch_size": "rollout.prompts",
    "train_batch_size": "rollout.prompts",
    "num_generations": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_n": "rollout.group_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "stop": "rollout.stop_strings",
    "beta": "objective.kl.coefficient",
    "kl_coef": "objective.kl.coefficient",
    "init_kl_coef": "objective.kl.coefficient",
    "epsilon": "objective.surrogate.low",
    "epsilon_high": "objective.surrogate.high",
    "clip_eps": "objective.surrogate.low",
    "clip_ratio": "objective.surrogate.low",
    "loss_type": "objective.preset",
    "adv_estimator": "objective.preset",
    "advantage_estimator": "objective.preset",
    "scale_rewards": "objective.advantage.scale",
    "reward_funcs": "[[reward]] name",
    "reward_weights": "[[reward]] weight",
    "model_name": "model.source",
    "model_name_or_path": "model.source",
    "model_id": "model.source",
    "pretrain": "model.source",
    "torch_dtype": "model.dtype",
    "r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.target_modules",
    "init_lora_weights": "model.lora.init",
    "gradient_checkpointing": "train.recompute",
    "enable_gradient_checkpointing": "train.recompute",
    "optim": "train.optimiser",
    "optimizer": "train.optimiser",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "train_files": "data.source",
    "output_dir": "out",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
}

_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list, for example []",
    "list_type": "a list, for example []",
    "dict_type": "a table of keys",
    "model_type": "a table of keys",
    "model_attributes_type": "a table of keys",
}


def show(value: object) -> str:
    """A value as TOML would print it, short, with every unprintable character escaped (it may reach a terminal).

    >>> show("a\\x1b[31m")
    '"a\\\\u001b[31m"'
    >>> show(True)
    'true'
    """
    if isinstance(value, str | bool | int | float | list):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = "a table" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return text if len(text) <= 80 else text[:77] + "…"


def explain_error(fault: Mapping[str, Any], where: Callable[[KeyPath], str]) -> str:
    """One line for one fault that the schema found: `file:line: key: what is wrong; what to write`."""
    path: KeyPath = tuple(fault["loc"])
    name = ".".join(str(part) for part in path)
    return place(where(path), name) + _what(fault, path)


def place(where: str, name: str) -> str:
    """`file:line: key: `, without saying the key twice when it was given by `--set`."""
    return f"{where}: " if where == f"--set {name}" else f"{where}: {name}: "


def _what(fault: Mapping[str, Any], path: KeyPath) -> str:
    kind, given, context = fault["type"], fault["input"], fault.get("ctx", {})
    key = path[-1]
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return f"is missing; {_MISSING.get(str(key), f'write {key} = …')}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        hint = did_you_mean(given, choices) if isinstance(given, str) else "choose from: " + ", ".join(sorted(choices))
        return f"{show(given)} is not a choice; {hint}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{show(given)} is out of range; it must be {words} {context[bound]}"
    if kind == "finite_number":
        return f"{show(given)} is not a finite number; write a number"
    if kind == "string_too_short":
        return "is empty; write a name, or remove the key"
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {show(given)}{_instead(kind, str(key), given)}"
    return f"{fault['msg']}, got {show(given)}"


def _instead(kind: str, key: str, given: object) -> str:
    """`; write key = value` where the intended value can be read off what was written."""
    text = given.strip() if isinstance(given, str) else ""
    if kind in ("int_type", "float_type") and re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", text):
        number = float(text)
        plain = text if kind == "float_type" or not number.is_integer() else str(int(number))
        return f"; write {key} = {plain} without quotes"
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and given.is_integer():
        return f"; write {key} = {int(given)}"
    if kind == "bool_type" and (given in (0, 1) or text.lower() in ("true", "false", "yes", "no", "on", "off")):
        yes = given == 1 or text.lower() in ("true", "yes", "on")
        return f"; write {key} = {'true' if yes else 'false'}"
    if kind == "string_type" and isinstance(given, bool | int | float):
        return f'; write {key} = "{show(given)}"'
    if kind == "tuple_type" and isinstance(given, str):
        return f"; write {key} = [{show(given)}]"
    if kind == "tuple_type" and key == "reward":
        return "; write [[reward]] with double brackets, one for each part"
    return ""


def _unknown(path: KeyPath) -> str:
    names = tuple(part for part in path[:-1] if isinstance(part, str))
    key = str(path[-1])
    table = table_of(names)
    known = set(table.model_fields) if table else set()
    if key in ELSEWHERE and ELSEWHERE[key] != ".".join((*names, key)):
        return f"unknown key; Gropius calls it {ELSEWHERE[key]}"
    homes = [".".join((*home, key)) for home, other in TABLES.items() if key in other.model_fields and home != names]
    near = did_you_mean(key, known)
    if homes and not near.startswith("did you mean"):
        return f"unknown key here; write {' or '.join(homes)}"
    return f"unknown key; {near}"


_MISSING = {
    "data": 'write a table [data] with source = "arithmetic", or the path of a JSONL file',
    "source": 'write source = "arithmetic", or the path of a JSONL file',
    "name": 'write name = "exact_match", or module:function',
}
