"""A recorded run as the measurement of a plan."""

from __future__ import annotations

import numpy as np
import pytest

from gropius.errors import DataError
from gropius.objective.presets import PRESETS
from gropius.plan import recorded
from gropius.plan.question import scale_of
from gropius.plan.signal import ESTIMATORS


class Table:
    def __init__(self, rows):
        self.rows = rows

    def to_pylist(self):
        return self.rows


def row(group, member, raw, *, step=1, status="scored", reward=0.0, length=3):
    return {"step": step, "group_id": group, "member": member, "status": status, "raw": raw, "reward": reward,
            "loss_mask": [True] * length}  # fmt: skip


@pytest.fixture
def reader(monkeypatch):
    tables: dict[int, Table] = {}

    class Reader:
        def __init__(self, folder):
            self.folder, self.problems = folder, ["step 3 is damaged"]

        def steps(self):
            return sorted(tables)

        def table(self, step, columns):
            return tables[step]

    monkeypatch.setattr(recorded, "RunReader", Reader)
    return tables


def test_groups_of_a_run_become_counts_of_solved_responses(reader, tmp_path):
    reader[1] = Table([row("a", 0, 1.0), row("a", 1, 0.0, length=5), row("b", 0, 1.0), row("b", 1, 1.0)])
    reader[2] = Table([row("c", 0, 0.5, step=2), row("c", 1, None, step=2, reward=1.0)])
    counts, notes = recorded.from_run(tmp_path)
    assert np.stack([counts.solved, counts.sampled, counts.step], 1).tolist() == [[1, 2, 1], [2, 2, 1], [1, 2, 2]]
    assert counts.response_tokens == pytest.approx(20 / 6)
    assert any("no raw metric" in note for note in notes) and "step 3 is damaged" in notes


def test_void_unscored_and_greedy_responses_are_left_out(reader, tmp_path):
    reader[1] = Table([row("a", 0, 1.0), row("a", 1, None, status="void", reward=None), row("a", -1, 1.0),
                       row("b", 0, None, status=None, reward=None)])  # fmt: skip
    counts, _ = recorded.from_run(tmp_path)
    assert counts.sampled.tolist() == [1]
    reader.clear()
    with pytest.raises(DataError, match="no scored group"):
        recorded.from_run(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_an_estimator(name):
    scale, note = scale_of(PRESETS[name].objective)
    assert scale in ESTIMATORS
    if name in ("grpo", "dapo", "gspo"):
        assert (scale, note) == ("group_std", "")
