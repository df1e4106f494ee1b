"""One thread: the models here are tiny."""

import torch

torch.set_num_threads(1)
