"""One synthetic run for all tests of this room, and an application to ask."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

starlette = pytest.importorskip("starlette", reason="the viewer needs gropius[view]")

from starlette.testclient import TestClient  # noqa: E402
from synthetic import make_run  # noqa: E402

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
