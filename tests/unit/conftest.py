import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("unit", database=None, deadline=None, derandomize=True)
settings.load_profile("unit")

torch.set_num_threads(1)  # the tensors here are small, and threads that wait for a busy core are slower than one


@pytest.fixture(scope="package", autouse=True)
def no_disk_is_waited_for():
    """What is written here need not outlive the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a closed file too
        yield
