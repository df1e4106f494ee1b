"""The viewer on a run of a million responses: opening, filtering, sorting, searching, one long response, memory.

    python benchmarks/viewer.py [--responses 1000000] [--tokens 24] [--folder FOLDER]

The run is made by the records' own table and writer format, one file a step, kept in FOLDER when given. Every time is
of a whole request through the application in a fresh process, the JSON included.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP, STEP = 8, 1000
LONG_TOKENS = 100_000


def main() -> None:
    """Make the run if need be, measure it in a fresh process, print one line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "million"
        if not (folder / "metrics.jsonl").exists():
            seconds = make(folder, given.responses // STEP, given.tokens)
            print(f"made {given.responses} responses in {seconds:.0f} s")
        size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        print(f"{given.responses} responses of {given.tokens} tokens, {size / 1e9:.2f} GB of rollouts")
        environment = dict(os.environ, XDG_CACHE_HOME=str(Path(temporary) / "cache"))
        for label in ("first opening, no index", "second opening, index saved"):
            print(f"-- {label}")
            sys.stdout.flush()
            subprocess.run([sys.executable, __file__, "--measure", str(folder)], check=True, env=environment)


def make(folder: Path, steps: int, tokens: int) -> float:
    """Write the run; seconds. The rows of one step stand for all, with their own ids, rewards and states."""
    from gropius.objective.spec import Objective
    from gropius.records import ResponseRecord, RunWriter
    from gropius.records.schema import REPEATED, row_group_size, to_table
    from gropius.types import scored

    began, random = time.monotonic(), np.random.default_rng(0)

    def record(i: int, length: int) -> ResponseRecord:
        values = random.normal(-1, 0.3, length).astype(np.float32)
        return ResponseRecord(
            step=1, group_id="", member=i % GROUP, task_key=f"task/{i // GROUP}", prompt_ids=np.arange(20),
            response_ids=random.integers(0, 100, length), prompt_text="What is 17 + 25?", messages="[]",
            response_text=f"17 + 25 = {i}" + " and so on" * (length // 12), loss_mask=np.ones(length, np.bool_),
            parts={"exact": scored(1.0)}, status="scored", reward=1.0, reason="", raw=1.0, state="informative",
            advantage=0.0, token_advantages=None, skipped=False, update=0, duplicate=False, truncated=False,
            finish_reason="stop", error="", policy_version=0, weight_digest="", sampling_time_s=0.1,
            scoring_time_s=0.1, sampler=values, drawn=values, anchor=values, policy=values, reference=values,
            entropy=values, weight=values, contribution=values,
        )  # fmt: skip

    records = [record(i, tokens + int(random.integers(-8, 8))) for i in range(STEP)]
    plain = to_table(records)
    records[-1] = replace(record(STEP - 1, LONG_TOKENS), member=GROUP - 1)
    long = to_table(records)
    with RunWriter.create(folder, {"name": "million", "objective": Objective().as_dict()}) as writer:
        for step in range(1, steps + 1):
            table = long if step == steps else plain
            rewards = (random.random(STEP) < step / steps).astype(np.float64)
            groups = rewards.reshape(-1, GROUP)
            state = np.where(
                groups.max(1) != groups.min(1), "informative", np.where(groups[:, 0] > 0, "all_solved", "all_failed")
            )
            spread = np.where(groups.std(1) > 0, groups.std(1), 1.0)
            advantage = ((groups - groups.mean(1, keepdims=True)) / spread[:, None]).reshape(-1)
            columns = {
                "step": pa.array(np.full(STEP, step, np.int32)),
                "group_id": pa.array([f"{step:06d}-{i // GROUP:04d}" for i in range(STEP)]),
                "reward": pa.array(rewards),
                "raw": pa.array(rewards),
                "state": pa.array(np.repeat(state, GROUP)),
                "advantage": pa.array(advantage),
            }
            for name, values in columns.items():
                at = table.schema.get_field_index(name)
                table = table.set_column(at, table.schema.field(at), values)
            pq.write_table(
                table, folder / "rollouts" / f"step-{step:06d}.parquet", row_group_size=row_group_size(records),
                compression="zstd", write_page_checksum=True, use_dictionary=REPEATED,
            )  # fmt: skip
            writer.write_metrics(
                step, {"reward": float(rewards.mean()), "loss": 0.1, "step_time": 1.0, "tokens_sampled": STEP * tokens}
            )
    return time.monotonic() - began


def measure(folder: Path) -> None:
    """Ask what a person asks, in the order of a first look."""
    from starlette.testclient import TestClient

    began = time.perf_counter()
    from gropius.viewer.library import Library
    from gropius.viewer.server import application

    cache = Path(os.environ["XDG_CACHE_HOME"]) / "gropius" / "view"
    library = Library([folder], cache)
    client = TestClient(
        application(library, "t", 0), base_url="http://127.0.0.1:1", headers={"authorization": "Bearer t"}
    )  # type: ignore[arg-type]
    last = RunSteps(folder).last

    def get(path: str, **query: Any) -> Any:
        answer = client.get(f"/api/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    run = f"runs/{folder.name}"
    get("about")
    say("import, and the list of runs", [time.perf_counter() - began])
    began = time.perf_counter()
    get(run)
    get(f"{run}/groups", step=last)
    say("open the run, and the groups of its last step", [time.perf_counter() - began])
    say("curves of all steps", repeat(lambda: get(f"{run}/curves"), 3))
    say("another step's groups", repeat(iter_steps(get, run, last), 5))
    say("one group of eight", repeat(lambda: get(f"{run}/steps/{last // 2}/groups/{last // 2:06d}-0007"), 5))
    path = f"{run}/steps/{last}/groups/{last:06d}-{STEP // GROUP - 1:04d}/responses/{GROUP - 1}"
    say(
        f"open a response of {LONG_TOKENS} tokens and its first window",
        repeat(lambda: (get(path), get(f"{path}/tokens")), 3),
    )
    say("its last window", repeat(lambda: get(f"{path}/tokens", start=LONG_TOKENS - 4096), 3))
    waited = time.perf_counter()
    library.index(folder.name).wait()
    say("wait until every group is indexed", [time.perf_counter() - waited])
    say("all groups, first rows", repeat(lambda: get(f"{run}/groups"), 5))
    say("a queue over all groups, sorted, rows from the middle", repeat(
        lambda: get(f"{run}/groups", queue="informative", sort="advantage", offset=40_000), 5))  # fmt: skip
    say("the same task at every step", repeat(lambda: get(f"{run}/task", key="task/7"), 3))
    say("text search, until its time limit", repeat(lambda: get(f"{run}/groups", text="no such words"), 3))
    index = sum(path.stat().st_size for path in cache.glob("*.parquet"))
    print(f"   index {index / 1e6:.1f} MB on disk; peak memory {peak_mb():.0f} MB; load {os.getloadavg()[0]:.1f}")


class RunSteps:
    """The steps of the run on disk."""

    def __init__(self, folder: Path) -> None:
        self.last = int(sorted(path.stem for path in (folder / "rollouts").iterdir())[-1].rpartition("-")[2])


def iter_steps(get: Callable[..., Any], run: str, last: int) -> Callable[[], Any]:
    """A different step at each call."""
    steps = iter(range(last // 3, last))
    return lambda: get(f"{run}/groups", step=next(steps))


def repeat(ask: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of several calls."""
    out = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        out.append(time.perf_counter() - began)
    return out


def say(what: str, seconds: list[float]) -> None:
    """One line: median, least and most."""
    spread = f"  ({min(seconds):.3f} to {max(seconds):.3f}, {len(seconds)} runs)" if len(seconds) > 1 else ""
    print(f"   {statistics.median(seconds):7.3f} s  {what}{spread}")


def peak_mb() -> float:
    """Peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
