"""The model card of an exported model: where it comes from, and everything that was done to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gropius.objective.formula import formula
from gropius.recipe.resolve import Resolved
from gropius.recipe.text import as_toml
from gropius.records.reader import RunReader
from gropius.train.checkpoint import Snapshot

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SHARES = ("mean", "pass", "maj")


def card(reader: RunReader, plan: Resolved, snapshot: Snapshot, *, adapter: bool = False) -> str:
    """README.md of an exported model, in the Hub's form. All text of foreign origin stands in code blocks.

    reader, plan: the run and its recipe. snapshot: the checkpoint that is exported. adapter: the folder holds one
    alone, and not a whole model.
    """
    document, origin = reader.resolved(), snapshot.facts["origin"]
    held_out = held_out_table(reader.metrics(), snapshot.step)
    parts = [
        _front(plan, adapter),
        f"# {plan.name}",
        f"{base_model(plan)}, trained by group-relative policy optimisation: step {snapshot.step} of "
        f"{plan.train.steps}, {snapshot.facts['state']['tokens_trained']:,} tokens trained of "
        f"{snapshot.facts['state']['tokens_sampled']:,} sampled.",
        *_base_and_adapter(plan, origin, adapter),
        "## Held-out results",
        held_out or "Nothing was measured.",
        "## Objective",  # every field of it stands in the recipe below
        _block(formula(plan.objective)),
        "## Reward",
        _block("\n".join(origin["reward"])),
        f"Programs of the model: {isolation(document.get('sandbox'))}",
        "## Data",
        _block(f"source       {plan.data.source}\noptions      {plan.data.options}\nfingerprint  {origin['tasks']}"),
        *_lineage(document.get("fork")),
        "## Findings",
        findings(reader.findings()),
        "## Recipe",
        f"SHA-256 `{plan.sha256}`; weights `{snapshot.facts['weights']}`.",
        _block(as_toml(plan).strip(), "toml"),
        "## Made with",
        _block("\n".join(f"{name} {value}" for name, value in origin["machine"].items())),
    ]
    return "\n\n".join(parts) + "\n"


def base_model(plan: Resolved) -> str:
    """What the policy was before: its source, in words."""
    return (
        "The built-in model with random weights" if plan.model.source == "tiny" else f"`{_inline(plan.model.source)}`"
    )


def isolation(sandbox: Any) -> str:
    """How programs that the model wrote were isolated, in words; sandbox: what resolved.json says of it."""
    if not isinstance(sandbox, Mapping):
        return "none were run."
    earlier = sandbox.get("before", ())
    tiers = dict.fromkeys(str(one["tier"]) for one in (*earlier, sandbox) if "tier" in one)
    words = f"isolation tier {', then '.join(f'`{_inline(tier)}`' for tier in tiers)}." if tiers else "none were run."
    if sandbox.get("unsafe"):
        words += " **They ran with the rights of the user.**"
    for name, tier in sandbox.get("scorers", {}).items():
        words += f" What `{_inline(str(name))}` evaluated ran in tier `{_inline(str(tier))}`."
    return words


def held_out_table(rows: Sequence[Mapping[str, Any]], step: int) -> str:
    """Every held-out measurement up to a step, with 95 % intervals, as a Markdown table; "" without one."""
    measured = [row for row in rows if "held_out/mean" in row and row["step"] <= step]
    if not measured:
        return ""
    lines = ["| step | mean | pass | maj | tasks | samples |", "|---|---|---|---|---|---|"]
    for row in measured:
        shares = (
            f"{row[f'held_out/{key}']:.3f} [{row[f'held_out/{key}_low']:.3f}, {row[f'held_out/{key}_high']:.3f}]"
            for key in SHARES
        )
        lines.append(f"| {row['step']} | {' | '.join(shares)} | {row['held_out/tasks']} | {row['held_out/samples']} |")
    return "\n".join(lines)


def findings(found: Sequence[Mapping[str, Any]]) -> str:
    """The doctor's findings, one line each, or that there are none."""
    if not found:
        return "None were recorded."
    texts = (
        ": ".join(str(row[key]) for key in ("severity", "name", "message", "summary", "text") if row.get(key))
        for row in found
    )
    return _block("\n".join(text or json.dumps(row) for text, row in zip(texts, found, strict=True)))


def _base_and_adapter(plan: Resolved, origin: Mapping[str, Any], adapter: bool) -> list[str]:
    """The base and the adapter by name, for a run that trained one."""
    lora = plan.model.lora
    if not lora.on:
        return []
    begun = f"the adapter in `{_inline(lora.adapter)}`" if lora.adapter else f"a fresh one of rank {lora.rank}"
    rows = [
        f"Base: {base_model(plan)}, weights `{origin.get('base')}`.",
        f"Trained: a LoRA adapter, begun from {begun}; everything else stayed as it was.",
    ]
    if adapter:
        rows.append("This folder holds the adapter alone: `peft.PeftModel.from_pretrained(base, FOLDER)` puts it in.")
    else:
        rows.append("This folder holds the base with the adapter merged in.")
    return ["## Base and adapter", "\n".join(f"- {row}" for row in rows)]


def _front(plan: Resolved, adapter: bool) -> str:
    library = "peft" if adapter else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(plan.model.source):
        lines.append(f"base_model: {plan.model.source}")
    return "\n".join([*lines, "tags:", "- gropius", "- grpo", "- reinforcement-learning", "---"])


def _lineage(fork: Any) -> list[str]:
    if not isinstance(fork, Mapping):
        return []
    words = [f"{fork.get('run')} at step {fork.get('step')}", *map(str, fork.get("differences", ()))]
    return ["## Forked from", _block("\n".join(words))]


def _block(text: str, kind: str = "") -> str:
    """A code block that nothing in the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}"


def _inline(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")
