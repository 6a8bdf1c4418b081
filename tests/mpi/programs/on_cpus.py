"""hvdtrain.effnet or hvdtrain.bert, the first word, with fp16 on CPUs, which want a GPU for it, and --compile that
writes no C++, which takes minutes. Both are slow there: TESTS_IMAGES says with how many of the digits to train."""

import os
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hvdtrain.feed.feed import Resident
from hvdtrain.program import checks
from hvdtrain.ranks.device import choose_device
from hvdtrain.vision import images

if "TESTS_IMAGES" in os.environ:
    whole = images.digits()
    few = {name: tensor[: int(os.environ["TESTS_IMAGES"])].clone() for name, tensor in whole.train.tensors.items()}
    images.digits = lambda: replace(whole, train=Resident(**few))
checks.require_device = lambda comm, _: choose_device(comm)
torch.compile = partial(torch.compile, backend="aot_eager")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
