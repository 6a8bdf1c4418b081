"""hvdlaunch: from a machine's topology to running ranks. It does not import torch, because it runs on a login node."""

__version__ = "0.1.0"
