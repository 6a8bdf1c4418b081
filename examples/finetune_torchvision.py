"""Fine-tune torchvision's classifiers, except googlenet and inception_v3, on pictures/train/CLASS and /val/CLASS.

    python finetune_torchvision.py                                  one process, resnet18, no MPI needed
    hvdlaunch run -np 2 -- python finetune_torchvision.py --run a   two ranks; the same again resumes the run

scikit-learn's digits as pictures, --weights none --size 32 --no-mirror --epochs 2: accuracy 0.961 to 0.967 (3 seeds).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torchvision.datasets import ImageFolder
from torchvision.models import get_model, get_model_weights

import hvdtrain


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    """Fine-tune a model of torchvision on a folder of pictures."""

    model: str = "resnet18"
    data_dir: Path = Path("pictures")
    epochs: int = 10
    batch_size_per_rank: int = 32
    weights: str = "hub"
    """Initial weights: hub for torchvision's, none, or a file in the format that --save writes."""
    freeze: bool = False
    """Train only the last layer."""
    size: int | None = None
    """Pixels of a picture's side; the size used in the training of torchvision's weights if not given."""
    mirror: bool = True
    """Mirror half of the pictures in training."""
    save: Path = Path("model.pt")
    """File for the state dict of the trained model."""


class Pictures(hvdtrain.Task):
    unit, best, higher_is_better, means = "images", "accuracy", True, ("accuracy",)

    def __init__(self, settings):
        self.seed, self.mirror = settings.seed, settings.mirror

    def prepare(self, raw, samples, epoch):  # on the GPU if there is one; the test has no epoch
        if epoch is None or not self.mirror:
            return raw
        mirrored = samples.new_tensor([hash((self.seed, epoch, sample)) % 2 for sample in samples.tolist()]).bool()
        return {**raw, "inputs": raw["inputs"].flip(3).where(mirrored.view(-1, 1, 1, 1), raw["inputs"])}

    def loss(self, model, batch, *, training):
        scores, classes = model(batch["inputs"]), batch["targets"]
        loss, right = cross_entropy(scores, classes, reduction="sum"), (scores.argmax(1) == classes).sum()
        return hvdtrain.Sums(loss=loss, count=loss.new_full((), len(classes)), more={"accuracy": right})


def begin(settings):
    name, weights = settings.model, settings.weights
    size = {} if settings.size is None else {"crop_size": settings.size, "resize_size": settings.size}
    try:
        transform = get_model_weights(name).DEFAULT.transforms(**size)
        train, val = (ImageFolder(settings.data_dir / split, transform) for split in ("train", "val"))
        if train.classes != val.classes:
            raise ValueError(f"train has the classes {train.classes}, val {val.classes}")
        torch.manual_seed(settings.seed)
        model = get_model(name, num_classes=len(train.classes))
        *_, head = (key.rpartition(".")[0] for key, _ in model.named_parameters())  # each model ends with its head
        if weights != "none":
            hub, state = weights == "hub", model.state_dict()
            known = get_model(name, weights="DEFAULT").state_dict() if hub else torch.load(weights, weights_only=True)
            model.load_state_dict(known | {key: state[key] for key in state if key.startswith(head)})
    except (OSError, ValueError, RuntimeError) as error:
        raise hvdtrain.BadInput(" ".join(str(error).split())[:300]) from error
    for key, parameter in model.named_parameters():
        parameter.requires_grad = key.startswith(head) or not settings.freeze
    return model, train, val


def main(run: hvdtrain.Run[Settings]) -> None:
    model, train, val = run.agree(lambda: begin(run.settings))
    training = run.training(model, Pictures(run.settings), train=train, test=val)
    for _ in training:
        pass
    if weights := training.gather_model():  # on rank 0
        torch.save(weights, run.settings.save)


if __name__ == "__main__":
    hvdtrain.start(main, Settings)
