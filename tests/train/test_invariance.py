"""The table of `check --invariance`: every layout gives the gradient, and a broken layout is caught."""

from __future__ import annotations

import pytest
import torch
from batches import batch, build

from gropius.objective.presets import resolve
from gropius.train import invariance, processes
from gropius.train.forward import Forward
from gropius.train.invariance import Batch, invariances
from gropius.train.step import LearnerSettings

OBJECTIVE = resolve("dapo")
SETTINGS = LearnerSettings(pack_tokens=4096)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_every_layout_has_the_gradient_of_training(dtype: torch.dtype, bound: float) -> None:
    rows = invariances(Forward.of(build("llama", dtype)), OBJECTIVE, SETTINGS, Batch(batch()))
    assert len(rows) == 10
    for row in rows:
        assert row.bound == bound and row.held, row


def test_a_weight_that_depends_on_the_micro_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = invariance.gradient

    def averaged(forward, objective, settings, rows):  # type: ignore[no-untyped-def]
        found = honest(forward, objective, settings, rows)
        return found / 2 if settings.pack_tokens == 1 else found

    monkeypatch.setattr(invariance, "gradient", averaged)
    rows = invariances(Forward.of(build("llama")), OBJECTIVE, SETTINGS, Batch(batch()))
    assert [row.name for row in rows if not row.held] == ["micro-batches of one sequence"]


@pytest.mark.parametrize("fault", ["rounding", "layout"])
def test_a_row_out_of_bound_is_judged_in_float64(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    honest = invariance.gradient

    def off(forward, objective, settings, rows):  # type: ignore[no-untyped-def]
        found = honest(forward, objective, settings, rows)
        double = next(forward.model.parameters()).dtype == torch.float64
        return found * (1 + 3e-5) if not forward.packed and not (double and fault == "rounding") else found

    monkeypatch.setattr(invariance, "gradient", off)
    rows = invariances(Forward.of(build("llama", torch.float32)), OBJECTIVE, SETTINGS, Batch(batch()))
    (padded,) = (row for row in rows if row.name.startswith("padded rows"))
    assert padded.name == "padded rows, in float64 (3.0e-05 before)" and padded.bound == 1e-6
    assert padded.held == (fault == "rounding")
    assert all(row.held for row in rows if row is not padded)


def test_a_batch_without_a_live_row_differs_by_nothing() -> None:
    import dataclasses

    dead = [dataclasses.replace(row, skipped=True, weight=row.weight * 0) for row in batch()]
    rows = invariances(Forward.of(build("llama")), OBJECTIVE, SETTINGS, Batch(dead))
    assert all(row.found == 0 for row in rows)


def test_real_ranks_are_a_row_and_one_that_drops_its_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dropped(forward, objective, settings, rows):  # type: ignore[no-untyped-def]
        asked.append(len(rows.sequences))
        return processes.gradient(forward, objective, settings, rows.rows(range(len(rows.sequences) // 2)))

    monkeypatch.setattr(processes, "over_processes", dropped)
    rows = processes.every_invariance(Forward.of(build("llama")), OBJECTIVE, SETTINGS, Batch(batch()))
    assert len(rows) == 11 and asked == [len(batch())]
    assert [row.name for row in rows if not row.held] == ["2 ranks, each a process"]


@pytest.mark.slow
def test_real_ranks_have_the_gradient_of_training() -> None:
    forward = Forward.of(build("llama_tied", torch.float32))
    *_, row = processes.every_invariance(forward, OBJECTIVE, SETTINGS, Batch(batch()))
    assert row.name.startswith("2 ranks, each") and row.found < 1e-6 and row.held
