"""hvdtrain.effnet or bert, with options for what the program chooses, too: argv: effnet or bert, then its words.

The digits are half as wide and high, and the stem of effnet halves them once more: a step takes a fraction of its time.
TESTS_IMAGES says how many of them there are to train with, and a quarter of that to test with; TESTS_SIDE=32 leaves
their size as it is.
"""

import os
import runpy
import sys
from dataclasses import replace
from typing import Any

import hvdtrain
from hvdtrain.settings import command_line

start = hvdtrain.start


def on_small_digits(run: Any, main: Any) -> None:
    """The program itself, once the ranks have agreed on their settings, and may import torch."""
    from hvdtrain.feed.feed import Resident
    from hvdtrain.vision import images

    whole = images.digits()

    side, most = (int(os.environ.get(name, usual)) for name, usual in (("TESTS_SIDE", 16), ("TESTS_IMAGES", 1438)))
    every = whole.height // side

    def smaller(split: Any, count: int) -> Resident:
        pixels, labels = split.tensors["images"], split.tensors["labels"]
        return Resident(images=pixels[:count, :, ::every, ::every].contiguous(), labels=labels[:count].clone())

    few = replace(whole, train=smaller(whole.train, most), test=smaller(whole.test, most // 4), height=side)
    images.digits = lambda: few
    main(run)


command_line.chosen = lambda _: {}
program = sys.argv.pop(1)
if program == "effnet":
    sys.argv[1:1] = ["--stem-stride", "2"]
    hvdtrain.start = lambda main, *recipes, **more: start(lambda run: on_small_digits(run, main), *recipes, **more)
runpy.run_module(f"hvdtrain.{program}", run_name="__main__", alter_sys=True)
