"""hvdtrain.effnet or hvdtrain.bert, the first word, with fp16 on CPUs, which want a GPU for it, and --compile that
writes no C++, which takes minutes."""

import importlib
import sys
from functools import partial

import torch

import hvdtrain
from hvdtrain.program import checks
from hvdtrain.ranks.device import choose_device

checks.require_device = lambda comm, _: choose_device(comm)
torch.compile = partial(torch.compile, backend="aot_eager")
program = importlib.import_module(f"hvdtrain.{sys.argv.pop(1)}")
hvdtrain.start(program.main, *program.RECIPES.values(), resolve=program.resolve)
