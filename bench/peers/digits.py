"""The training of all programs here: a small network on scikit-learn's digits, 4 epochs of 10 steps on 2 ranks."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS, BATCH, LR, MOMENTUM = 4, 64, 0.05, 0.9  # the batch is a rank's
TIMEOUT_S = 10.0  # each peer's own limit for a collective or a step; the defaults are 1 to 30 minutes


def model() -> nn.Module:
    """The same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def data(first: int, last: int) -> TensorDataset:
    """These of the 1,797 digits; 1,280 are ten steps of two ranks."""
    folder = Path(find_spec("sklearn").origin).parent / "datasets" / "data"  # an import would take seconds
    table = torch.from_numpy(np.loadtxt(folder / "digits.csv.gz", delimiter=","))[first:last]
    return TensorDataset(table[:, :-1].float() / 16, table[:, -1].long())
