"""What was left out adds up to what padded rows would have run."""

from __future__ import annotations

import numpy as np
import pytest
from batches import batch, row
from small import run_small

from gropius.cli.console import Console
from gropius.records.reader import RunReader
from gropius.train.pack import pack
from gropius.train.savings import Saving, saving


def test_every_id_of_padded_rows_is_run_or_left_out_for_one_reason() -> None:
    rows = [
        row([1, 2, 3], [4, 5], group="a"),
        row([1, 2, 3], [6, 7, 8, 9], group="a", member=1, mask=[1, 1, 0, 0]),
        row([1, 2, 3], [5], group="a", member=2, skipped=True),
        row([9], [4, 4, 4, 4, 4], group="b"),
    ]
    found = saving(rows, pack(rows, budget_tokens=100), packed=True)
    # rows run: 1 2 3 4 | 6 (of 6, what predicts 7) | 9 4 4 4 4; prompt 1 2 3 once instead of twice
    assert found == Saving(run=3 + 1 + 1 + 5, shared=3, dead=4, tail=1 + 3 + 1, padded=4 * (3 + 5))
    assert found.padding == 4 * 8 - 10 - 3 - 4 - 5
    assert found.share == 1 - 10 / 32
    padded = saving(rows, pack(rows, budget_tokens=100), packed=False)
    assert padded.run == 3 * 5 and padded.shared == 0 and padded.dead == 4
    assert (found + padded).run == 25


@pytest.mark.parametrize("budget", [20, 1000])
@pytest.mark.parametrize("packed", [True, False])
def test_the_parts_add_up_on_ragged_batches(budget: int, packed: bool) -> None:
    rows = batch(seed=4)
    found = saving(rows, pack(rows, budget_tokens=budget), packed=packed)
    assert found.run + found.shared + found.dead + found.tail + found.padding == found.padded
    assert found.run > 0 and found.dead > 0
    assert (found.shared > 0) is packed and (not packed or found.padding > 0)


def test_no_row_saves_nothing() -> None:
    assert saving([], [], packed=True) == Saving() and Saving().share == 0.0


def test_it_is_in_the_metrics_of_every_step_and_on_the_lines_a_person_reads(tmp_path, capsys) -> None:
    folder, progress = run_small(tmp_path, "train.updates=2", "train.steps=2")
    console = Console()
    for step, rows in enumerate(progress.steps, start=1):
        console.step(step, 2, rows)
        assert rows["compute/run"] < rows["compute/padded"]
        assert rows["compute/saved"] == 1 - rows["compute/run"] / rows["compute/padded"]
    written = RunReader(folder).metrics_by_step()
    assert [written[step]["compute/run"] for step in (1, 2)] == [row["compute/run"] for row in progress.steps]
    total = int(np.sum([row["compute/run"] for row in progress.steps]))
    assert f"ran {total:,} of the" in console.saving_line() and "of padded" in capsys.readouterr().err
