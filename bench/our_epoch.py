"""Our loop over images that it reads itself: a part of an epoch of 50,000 in CIFAR-10's shape, augmented as by default.

    python bench/our_epoch.py OUT --model efficientnet_b7 --batch 8 --steps 6

For bench/book.py; bench/ours.py is the one over given tensors.
"""

import time

import torch
from ours import our_loop, settings_of
from workload import WARMUP_STEPS, StepClock, answer, asked, fast_kernels

from hvdtrain.core.position import Position
from hvdtrain.vision import images
from hvdtrain.vision.settings import scaled

DEFAULTS = ("augment", "label_smoothing", "ema_epochs", "lr")  # that ours.py leaves out


def main() -> None:
    chosen = asked()
    fast_kernels()
    settings = {name: getattr(scaled(), name) for name in DEFAULTS}
    settings |= {"precision": chosen.precision, "compile": chosen.compile, **settings_of(chosen.set)}
    steps, whole = WARMUP_STEPS + chosen.steps, images.synthetic()
    with our_loop(chosen.model, chosen.batch, steps=steps, whole=whole, **settings) as loop:
        device = loop.step.device
        started = time.perf_counter()
        _, inputs = next(loop.feed.inputs(loop.feed.batches(Position()), 0))
        next(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first_batch_s = time.perf_counter() - started
        clock = StepClock(device)
        loop.watch.begins = clock.mark
        loop.run()
        clock.mark()
        if loop.step.slots.comm.rank == 0:
            answer(chosen.out, clock, device, first_batch_s=first_batch_s)


if __name__ == "__main__":
    main()
