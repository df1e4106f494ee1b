"""Tiny models: threads only cost, and one thread gives the same bits whatever the machine. `batches` is importable."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
