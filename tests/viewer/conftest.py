"""One synthetic run for all tests of this room, and an application to ask."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

starlette = pytest.importorskip("starlette", reason="the viewer needs gropius[view]")

from starlette.testclient import TestClient  # noqa: E402
from synthetic import make_run  # noqa: E402

from gropius.objective.presets import resolve  # noqa: E402
from gropius.viewer.library import Library  # noqa: E402
from gropius.viewer.server import application  # noqa: E402

TOKEN = "t0ken-for-tests"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "synthetic"
    make_run(folder, steps=12).close()
    return folder


@pytest.fixture(scope="session")
def client(run_folder: Path) -> Iterator[TestClient]:
    app = application(Library([run_folder]), TOKEN, 8000)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://127.0.0.1:8000", headers=headers) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, run_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("library")
    shutil.copytree(run_folder, folder / "synthetic")
    make_run(folder / "other", steps=3, objective=resolve("dr_grpo")).close()
    return folder


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = runpy.run_path(str(Path(__file__).parents[1] / "doctor" / "test_foreign.py"), run_name="logs")["trl"]
    folder = tmp_path_factory.mktemp("logs") / "foreign"
    folder.mkdir()
    write(folder)
    return folder


@pytest.fixture(scope="session")
def site(runs: Path, foreign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from browser import serve

    yield from serve([runs, foreign], TOKEN, tmp_path_factory.mktemp("browser"))
