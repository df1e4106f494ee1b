"""`python -m gropius.cli.docs FOLDER`: the pages that are made from the code, so that they cannot disagree with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

MADE = "<!-- made by `make docs`; change the code, not this page -->\n\n"


def pages() -> dict[str, str]:
    """File name → Markdown of every page made from the code."""
    made = {"recipe.md": _recipe(), "metrics.md": _metrics(), "presets.md": _presets()}
    return {name: MADE + "\n".join(lines).rstrip() + "\n" for name, lines in made.items()}


def _recipe() -> Iterator[str]:
    from gropius.recipe.schema import TABLES

    yield "# Recipe keys\n\nA recipe is TOML. Any key can be set on the command line: `--set train.steps=10`.\n"
    for path, table in TABLES.items():
        inner = {home[-1] for home in TABLES if home and home[:-1] == path}
        name = f"[[{path[0]}]]" if path == ("reward",) else f"[{'.'.join(path)}]" if path else "Top of the file"
        yield f"## {name}\n\n| key | default | meaning |\n|---|---|---|"
        for key, field in table.model_fields.items():
            if key not in inner:
                default = "required" if field.is_required() else _cell(field.default)
                yield f"| `{key}` | {default} | {_escape(field.description or '')} |"
        yield ""
    yield from _objective()


def _objective() -> Iterator[str]:
    from gropius.objective.spec import AXES, Objective

    yield "## [objective]\n\n`preset` fills every key below; a key written here overrides it. Defaults: `grpo`.\n"
    default = Objective().as_dict()
    for axis, kind in AXES.items():
        yield f"### [objective.{axis}]\n\n{_escape(_paragraphs(kind.__doc__))}\n"
        yield "| key | default | choices |\n|---|---|---|"
        for key, value in default[axis].items():
            choices = [str(choice) for choice in get_args(_hint(kind, key))]
            yield f"| `{key}` | {_cell(value)} | {', '.join(choices)} |"
        yield ""


def _metrics() -> Iterator[str]:
    from gropius.records.metrics import METRICS

    yield "# Metrics\n\nA line of `metrics.jsonl` a step. What is not finite is `null`, named in `non_finite`.\n"
    yield "| name | unit | meaning | made by |\n|---|---|---|---|"
    for name, metric in METRICS.items():
        clock = ", a clock" if metric.timing else ""
        yield f"| `{name}` | {metric.unit} | {_escape(metric.meaning)} | {metric.made_by}{clock} |"


def _presets() -> Iterator[str]:
    from gropius.cli.presets import describe
    from gropius.objective.presets import PRESETS

    yield "# Presets\n\nA preset fills every field of the objective; any field can be overridden.\n"
    for name in PRESETS:
        report = describe(name)
        yield f"## {name}\n\n{_escape(report['title'])}. {_escape(report['citation'])}.\n"
        yield f"```\n{report['formula']}\n```\n"
        changed = [f"`{key} = {_value(report['fields'], key)}`" for key in report["differs_from_grpo"]]
        yield f"Not as in grpo: {', '.join(changed) or 'nothing'}.\n"
        yield f"Against the print: {_escape(report['print_difference'])}\n"
        yield "\n".join(f"- {framework}: {_escape(words)}" for framework, words in report["elsewhere"].items()) + "\n"


def _value(fields: dict[str, dict[str, Any]], key: str) -> Any:
    axis, _, name = key.partition(".")
    return fields[axis][name]


def _hint(kind: type[Any], key: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(kind)[key]


def _paragraphs(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(value: Any) -> str:
    if value is None:
        return "derived"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value in ((), {}, "") else f"`{_escape(str(value))}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(folder: Path) -> None:
    """Write every page into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
