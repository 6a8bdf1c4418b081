import torch
from hypothesis import settings

settings.register_profile("unit", database=None, deadline=None, derandomize=True)
settings.load_profile("unit")

torch.set_num_threads(1)  # the tensors here are small, and threads that wait for a busy core are slower than one
