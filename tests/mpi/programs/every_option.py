"""hvdtrain.effnet or bert, with options for what the program chooses, too: argv: effnet or bert, then its words.

The digits are half as wide and high, and the stem of effnet halves them once more: a step takes a fraction of its time.
The last word --images=N says how many of them there are to train with, and a quarter of that to test with;
TESTS_SIDE=32 leaves their size as it is.
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
    from hvdtrain.loop.feed.feed import Resident
    from hvdtrain.tasks.vision import images

    whole = images.digits()
    side = int(os.environ.get("TESTS_SIDE", "16"))
    every = whole.height // side

    def smaller(split: Any, most: int) -> Resident:
        pixels, labels = split.tensors["images"], split.tensors["labels"]
        return Resident(images=pixels[:most, :, ::every, ::every].contiguous(), labels=labels[:most].clone())

    few = replace(whole, train=smaller(whole.train, count), test=smaller(whole.test, count // 4), height=side)
    images.digits = lambda: few
    main(run)


command_line.auto_fields = lambda _: {}
program = sys.argv.pop(1)
*_, count = [1438, *(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--images="))]
sys.argv = [word for word in sys.argv if not word.startswith("--images=")]
if program == "effnet":
    sys.argv[1:1] = ["--stem-stride", "2"]
    hvdtrain.start = lambda main, *recipes, **more: start(lambda run: on_small_digits(run, main), *recipes, **more)
runpy.run_module(f"hvdtrain.{program}", run_name="__main__", alter_sys=True)
