"""Train an EfficientNet with Horovod.

    python -m hvdtrain.effnet --data digits --model efficientnet_tiny        one process, no MPI needed
    horovodrun -np 8 python -m hvdtrain.effnet                               one host, CIFAR-10
    mpirun -np 8 python -m hvdtrain.effnet                                   the same by mpirun
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.effnet         two hosts, the best GPUs of each

The result is written to runs/effnet/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

from __future__ import annotations

import hvdtrain
from hvdtrain.tasks.vision.settings import RECIPES, EffnetSettings, resolve


def main(run: hvdtrain.Run[EffnetSettings]) -> None:
    """Train on this rank's part of the images; Horovod sums the gradients of all ranks at each step."""
    # These imports load torch, which takes seconds; the ranks have agreed on their settings by now.
    from hvdtrain.tasks.vision import data, models
    from hvdtrain.tasks.vision.task import image_task

    ranks, settings = run.ranks, run.settings
    images = data.load_on_all(ranks, settings)
    run.settings = settings = data.with_choices(ranks, settings, images)
    models.fetch_on_all(ranks, settings.model, settings.pretrained)
    training = run.training(
        lambda: models.build(
            settings.model,
            classes=images.classes,
            pretrained=settings.pretrained,
            stem_stride=settings.stem_stride,
            dropout=settings.dropout,
            stochastic_depth=settings.stochastic_depth,
        ),
        image_task(settings, images, run.device),
        train=images.train,
        test=images.test,
        cuts=lambda model: hvdtrain.Cuts(blocks=models.blocks(model)),
        about={"classes": images.classes},
    )
    for _ in training:  # reports and epochs, which are recorded in the run folder
        pass


if __name__ == "__main__":
    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)
