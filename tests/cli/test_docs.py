"""Laws of the pages made from code: they name every key, metric and preset."""

from __future__ import annotations

from gropius.cli.docs import pages
from gropius.objective.presets import PRESETS
from gropius.recipe.schema import TABLES, key_paths
from gropius.records import METRICS

KEYS_OF_TABLES = {path[-1] for path in TABLES if path}


def test_every_key_metric_and_preset_has_its_line() -> None:
    made = pages()
    assert all(f"| `{key.rpartition('.')[2]}` |" in made["recipe.md"] for key in key_paths() if key != "objective")
    assert all(f"| `{name}` |" in made["metrics.md"] for name in METRICS)
    assert all(f"## {name}\n" in made["presets.md"] for name in PRESETS)


def test_every_key_and_metric_says_what_it_means() -> None:
    for table in TABLES.values():
        missing = [
            key for key, field in table.model_fields.items() if not field.description and key not in KEYS_OF_TABLES
        ]
        assert not missing, table
    assert all(metric.meaning and metric.unit for metric in METRICS.values())
