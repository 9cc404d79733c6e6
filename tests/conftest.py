"""One thread in the parent, so that the ranks it forks are safe."""

import torch

torch.set_num_threads(1)
