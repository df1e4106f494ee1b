"""What this machine offers a run: memory of the device, free disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from gropius.models.load import LoadedModel
from gropius.recipe.capacity import Machine


def machine_of(folder: Path, loaded: LoadedModel) -> Machine:
    """Memory of the device that the model lies on, and free disk where the run folder will be."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if loaded.model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(loaded.model.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, shutil.disk_usage(place).free)
