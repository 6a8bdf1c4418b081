"""hvdtrain.effnet or hvdtrain.bert, the first word, with fp16 on CPUs, which want a GPU for it, and --compile that
writes no C++, which takes minutes. Both are slow there: TESTS_IMAGES says how many of the digits there are to train
with, and a quarter of that to test with."""

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
    most = int(os.environ["TESTS_IMAGES"])
    whole = images.digits()
    few = [
        Resident(**{name: tensor[:count].clone() for name, tensor in split.tensors.items()})
        for split, count in ((whole.train, most), (whole.test, most // 4))
    ]
    images.digits = lambda: replace(whole, train=few[0], test=few[1])
checks.require_device = lambda comm, _: choose_device(comm)
torch.compile = partial(torch.compile, backend="eager")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
