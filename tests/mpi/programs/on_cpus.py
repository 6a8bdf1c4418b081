"""hvdtrain.effnet or hvdtrain.bert, the first word, with fp16 on CPUs, which want a GPU for it, and --compile that
writes no C++, which takes minutes. Both are slow there: --images of every_option.py helps."""

import os
import runpy
from functools import partial
from pathlib import Path

import torch

from hvdtrain.program import checks
from hvdtrain.ranks.device import choose_device

os.environ.setdefault("TESTS_SIDE", "32")  # on smaller ones the first gradients overflow in fp16
checks.require_device = lambda comm, _: choose_device(comm)
torch.compile = partial(torch.compile, backend="eager")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
