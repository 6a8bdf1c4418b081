"""The training of all programs here: a small network on scikit-learn's digits, 4 epochs of 10 steps on 2 ranks."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS, BATCH, LR, MOMENTUM = 4, 64, 0.05, 0.9  # the batch is a rank's
TIMEOUT_S = 5.0  # each peer's own limit for a collective or a step; the defaults are 1 to 30 minutes


def model() -> nn.Module:
    """The same on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def data(first: int, last: int) -> TensorDataset:
    """These of the 1,797 digits; 1,280 are ten steps of two ranks."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    return TensorDataset(pixels[first:last].float() / 16, labels[first:last])
