"""The process has the shim: see tests/simgpu/start.py."""

import os
import sys

import pytest
import torch

from hvdtrain.tasks.vision import data
from tests import texts
from tests.simgpu.simulator.cuda import simulated
from tests.steps import images_of, split


@pytest.fixture(scope="session", autouse=True)
def _process(tmp_path_factory):
    """Texts in ./data, and few images, all in this process alone."""
    folder = tmp_path_factory.mktemp("programs")
    texts.put(folder / "data", train=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["program"])
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr(data, "load", lambda *_: images_of(split(96), split(20)))
        yield


@pytest.fixture
def gpu():
    """A simulated GPU."""
    state = torch.get_rng_state()
    with simulated() as one:
        yield one
    torch.set_rng_state(state)
