"""Tensors that are put together as they are read: a bucket at a time, all of them, and as a file that others read."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from batches import build
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gropius.train import gathered
from gropius.train.gathered import Gathered, bucketed, read, write
from gropius.train.team import _once

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "step": torch.tensor(3.0),
    "half": torch.arange(5).to(torch.bfloat16),
    "codes": torch.arange(6, dtype=torch.uint8),
    "whole": torch.arange(6.0).reshape(2, 3),
    "wide": torch.arange(4, dtype=torch.float64),
    "number": torch.tensor(-(2**40)),
    "nothing": torch.zeros(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


def asked(of: dict[str, Tensor]) -> tuple[Gathered, list[list[str]]]:
    """Tensors that seem to lie elsewhere, and what is asked for."""
    calls: list[list[str]] = []

    def whole(names: Sequence[str]) -> dict[str, Tensor]:
        calls.append(list(names))
        return {name: of[name] for name in names}

    return Gathered(of, whole), calls


@pytest.mark.parametrize("bucket", [1, 24, 40, 1 << 20])
def test_a_file_that_was_written_a_bucket_at_a_time_holds_every_bit(
    bucket: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "BUCKET_BYTES", bucket)
    tensors, calls = asked(TENSORS)
    write(tensors, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert sorted(name for names in calls for name in names) == sorted(TENSORS)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    data = (tmp_path / "a.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    for name, tensor in TENSORS.items():
        assert entries[name]["data_offsets"][0] % tensor.itemsize == 0, "each begins at a multiple of its width"


@pytest.mark.parametrize("bucket", [1, 24, 40, 1 << 20])
def test_buckets_hold_every_name_once_in_order_and_no_more_than_asked(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "BUCKET_BYTES", bucket)
    buckets = list(bucketed(TENSORS))
    assert [name for names in buckets for name in names] == list(TENSORS)
    for names in buckets:
        assert len(names) == 1 or sum(TENSORS[name].nbytes for name in names) <= bucket
    for one, two in itertools.pairwise(buckets):
        assert sum(TENSORS[name].nbytes for name in [*one, two[0]]) > bucket, "as few as may be"


def test_a_bucket_is_empty_when_the_next_is_there_and_reading_asks_for_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered, "BUCKET_BYTES", 24)
    tensors, calls = asked(TENSORS)
    before: dict[str, Tensor] = {}
    for bucket in tensors.buckets():
        assert bucket and not before
        before = bucket
    assert not before and len(calls) > 3
    calls.clear()
    assert [name for name, _ in read(tensors)] == list(TENSORS) == [name for names in calls for name in names]
    assert [name for name, _ in read(TENSORS)] == list(TENSORS)
    assert torch.equal(tensors["half"], TENSORS["half"]) and calls[-1] == ["half"] and len(tensors) == len(TENSORS)


def test_tied_tensors_are_saved_once_under_the_name_that_loading_asks_for() -> None:
    state = build("llama_tied").state_dict(keep_vars=True)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)
    assert set(state) - set(_once(state)) == {"lm_head.weight"}
