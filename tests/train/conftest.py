import torch

torch.set_num_threads(1)  # tiny models: threads only cost, and one thread gives the same bits on every machine
