"""`sick` is importable; one warm-started very small model a session, from which every run here begins."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that adds three digits right about half of the time."""
    from sick import warm_model

    return warm_model(tmp_path_factory.mktemp("warm"))
