"""Whole epochs of hvdtrain.effnet and hvdtrain.bert against the same training in plain DDP, as one would write it.

Both sides read, augment, train, average the weights and evaluate the same samples with the same model, DDP by torch's
own layers; ours also agrees, guards, reports and saves. hvdlaunch starts ours, torchrun DDP. The clock runs from the
end of one evaluation to the end of the next. With --busy other processes compute at the same time.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision.transforms import v2

from bench.jobs import hvdlaunch, job, torchrun
from bench.pairs import Case, Table, in_turns, middle, ratio
from bench.sides import in_users_form, optimizer_of
from hvdtrain.loop.feed.feed import Resident, Split
from hvdtrain.loop.feed.sequences import Sequences
from hvdtrain.tasks.text import data as texts
from hvdtrain.tasks.text import model, tokens
from hvdtrain.tasks.text import settings as text_settings
from hvdtrain.tasks.text.model import BertForClassification, sizes_of
from hvdtrain.tasks.vision import images, models

RANKS = 2
BARE = {"effnet": "--augment none --label-smoothing 0 --ema-epochs 0", "bert": "--clip-norm 0 --accumulate-steps 1"}
DATA = {"effnet": "--data synthetic --model efficientnet_b0", "bert": "--data icd10"}
BUSY = "while True: pass"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of both sides."""

    program: str  # effnet or bert
    batch: int  # samples per rank and step
    steps: int  # of an epoch
    epochs: int  # the first is a warm-up
    bare: bool  # no augmentation, smoothing and average; no clipping

    @property
    def samples(self) -> int:
        return RANKS * self.batch * self.steps


def resident(split: Split) -> dict[str, Tensor]:
    """Return the tensors of a split that is in memory."""
    assert isinstance(split, Resident)
    return dict(split.tensors)


def few_images(made: Callable[[], images.Images], training: Training) -> images.Images:
    """Return the first synthetic images, as many as an epoch has."""
    found = made()
    kept = [(found.train, training.samples), (found.test, RANKS * training.batch)]
    train, test = (
        Resident(**{name: one[:count].clone() for name, one in resident(split).items()}) for split, count in kept
    )
    return replace(found, train=train, test=test)


def few_texts(opened: Callable[[str], Any], training: Training, key: str) -> Any:
    """Return the first texts, as many as an epoch has."""
    found = opened(key)
    train, test = (
        Sequences(
            split._tokens,
            starts=split._starts[:count],
            lengths=split.lengths[:count].numpy(),
            labels=split._labels[:count],
            content=split.content,
        )
        for split, count in ((found.train, training.samples), (found.test, RANKS * training.batch))
    )
    return replace(found, train=train, test=test)


@contextlib.contextmanager
def few(training: Training) -> Iterator[None]:
    """Shorten the data sets of both sides."""
    with (
        patch.object(images, "synthetic", partial(few_images, images.synthetic, training)),
        patch.object(tokens, "open_texts", partial(few_texts, tokens.open_texts, training)),
    ):
        yield


def ours(out: Path, **given: Any) -> None:
    """Run one rank of the program; rank 0 writes the seconds of each epoch after the first."""
    import hvdtrain

    training = Training(**given)
    program = import_module(f"hvdtrain.{training.program}")
    bare = BARE[training.program] if training.bare else ""
    size = f"--global-batch-size {RANKS * training.batch} --epochs {training.epochs} --run r"
    sys.argv = [training.program, *f"{DATA[training.program]} {size} {bare}".split()]

    def main(run: Any) -> None:
        program.main(run)
        if run.ranks.rank == 0:
            lines = Path("runs", training.program, "r", "metrics.jsonl").read_text().splitlines()
            ends_s = [line["seconds"] for line in map(json.loads, lines) if "epoch" in line]
            out.write_text(json.dumps([end - start for start, end in itertools.pairwise(ends_s)]))

    with few(training):
        hvdtrain.start(main, *program.RECIPES.values(), resolve=program.resolve)


def augmented(batch: list[tuple[Tensor, Tensor]], *, transform: v2.Transform | None) -> tuple[Tensor, Tensor]:
    """Collate images, each with its own crop and flip."""
    pictures = torch.stack([picture if transform is None else transform(picture) for picture, _ in batch])
    return pictures, torch.stack([label for _, label in batch])


class PlainImages:
    """Images in the usual way: transforms of torchvision, one by one."""

    def __init__(self, training: Training) -> None:
        found = images.synthetic()
        crop = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
        self.train, self.test = (TensorDataset(*resident(split).values()) for split in (found.train, found.test))
        self.collate = partial(augmented, transform=None if training.bare else crop)
        self.collate_test = partial(augmented, transform=None)
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (found.mean, found.std))
        self.smoothing, self.max_norm = 0.0 if training.bare else 0.1, None
        self.model = in_users_form(models.build("efficientnet_b0", classes=10, stem_stride=1)).to(
            memory_format=torch.channels_last
        )
        self.optimizer = optimizer_of(self.model)
        self.averaged = not training.bare

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        pictures, labels = batch
        pictures = ((pictures.float() / 255 - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        logits = model(pictures)
        return F.cross_entropy(logits, labels, label_smoothing=smoothing), (logits.argmax(1) == labels).sum()


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Token numbers and a label for each text."""

    def __init__(self, split: Sequences) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        start, length = int(self._split._starts[row]), int(self._split.lengths[row])
        return torch.from_numpy(self._split._tokens[start : start + length].astype("int64")), torch.tensor(
            self._split._labels[row]
        )


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad a batch to its longest text."""
    return nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True), torch.stack([at for _, at in batch])


class PlainTexts:
    """Texts in the usual way: each batch padded to its longest."""

    def __init__(self, training: Training) -> None:
        found = texts.load_on_all(import_module("hvdtrain.ranks.comm").SerialComm(), text_settings.tiny(), None)
        self.train, self.test = Rows(found.train), Rows(found.test)
        self.collate = self.collate_test = padded
        self.smoothing, self.max_norm, self.averaged = 0.0, None if training.bare else 1.0, False
        patch.object(model, "_is_by_hand", return_value=False).start()  # torch's dropout and attention
        self.model = BertForClassification(
            sizes_of("bert_tiny", vocabulary=len(found.vocabulary.tokens)), len(found.labels)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], smoothing: float) -> tuple[Tensor, Tensor]:
        tokens, labels = batch
        logits = model(tokens, torch.zeros_like(tokens), tokens != 0)
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


def ddp(out: Path, **given: Any) -> None:
    """Run one rank of plain DDP; rank 0 writes the seconds of each epoch after the first."""
    training = Training(**given)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    with few(training):
        plain = PlainImages(training) if training.program == "effnet" else PlainTexts(training)
    model = DistributedDataParallel(
        plain.model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    sampler: DistributedSampler[Any] = DistributedSampler(plain.train, seed=0)
    train = DataLoader(plain.train, batch_size=training.batch, sampler=sampler, collate_fn=plain.collate)
    test = DataLoader(
        plain.test,
        batch_size=training.batch,
        sampler=DistributedSampler(plain.test, shuffle=False),
        collate_fn=plain.collate_test,
    )
    schedule = LinearLR(plain.optimizer, 1.0, 0.01, total_iters=training.epochs * training.steps)
    average = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.99)) if plain.averaged else None
    ends_s = []
    for epoch in range(training.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        model.train()
        for batch in train:
            loss, right = plain.loss(model, batch, plain.smoothing)
            loss.backward()
            if plain.max_norm is not None:
                nn.utils.clip_grad_norm_(plain.model.parameters(), plain.max_norm)
            plain.optimizer.step()
            plain.optimizer.zero_grad()
            schedule.step()
            if average is not None:
                average.update_parameters(plain.model)
            total += torch.stack([loss.detach(), right.float()])
        evaluated = (plain.model if average is None else average).eval()
        with torch.no_grad():
            total += torch.stack([torch.stack(plain.loss(evaluated, batch, 0.0)).float() for batch in test]).sum(0)
        distributed.all_reduce(total)
        ends_s.append(time.perf_counter())
        if distributed.get_rank() == 0:
            print(epoch, total.tolist())
    if distributed.get_rank() == 0:
        out.write_text(json.dumps([end - start for start, end in itertools.pairwise(ends_s)]))
    distributed.destroy_process_group()


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Let this many processes of others compute: each has a session of its own, as a login's have."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def program(chosen: argparse.Namespace) -> Table:
    """Samples/s of whole epochs of our programs over those of plain DDP; all rounds are kept.

    A program is effnet or bert with its batch per rank.
    """
    columns = ["program", "batch", "recipe", "busy processes", "ours / DDP", "ours, samples/s", "DDP, samples/s"]
    table = Table(name="program", question="Whole epochs on 2 ranks, against plain DDP:", columns=[*columns, "rounds"])
    for words, recipe, busy in itertools.product(chosen.programs, chosen.recipes, chosen.busy):
        name, _, batch = words.partition(":")
        bert = {"steps": chosen.bert_steps} if name == "bert" else {"steps": chosen.images // int(batch)}
        given = {"program": name, "batch": int(batch), "epochs": chosen.epochs, "bare": recipe == "bare", **bert}
        training = Training(**given)
        sides = {
            "ours": partial(job, hvdlaunch(RANKS), "cases.program:ours", **given),
            "DDP": partial(job, torchrun(RANKS), "cases.program:ddp", **given),
        }
        with beside(busy):
            epochs_s = in_turns(sides, chosen.rounds)
        speeds = {
            side: [training.samples / statistics.fmean(one) for one in of_side] for side, of_side in epochs_s.items()
        }
        rounds = " ".join(f"{one:.0f}/{other:.0f}" for one, other in zip(speeds["ours"], speeds["DDP"], strict=True))
        both = middle(speeds["ours"]), middle(speeds["DDP"])
        table.add(name, int(batch), recipe, busy, ratio(speeds["ours"], speeds["DDP"]), *both, rounds)
    return table


OPTIONS = {
    "programs": ["effnet:16", "effnet:64", "bert:96"],
    "recipes": ["default", "bare"],
    "busy": [0, 1, 2],
    "rounds": 15,
    "epochs": 3,
    "images": 240,  # of a rank and epoch
    "bert-steps": 40,
}
CASES = {"program": Case(measure=program, options=OPTIONS)}
