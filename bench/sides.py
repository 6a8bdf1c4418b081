"""The programs of a comparison: a run of hvdtrain, DistributedDataParallel, Horovod's own loop, and a plain one.

All get the same weights, tensors and clock: a few batches that stay on the device are used in turn, since reading and
augmenting are a separate question (case input). Each is one rank of a job (bench/jobs.py); rank 0 answers with the
seconds of each step after a warm-up, and with memory.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hvdtrain
from hvdtrain.core.blocks import Blocks
from hvdtrain.core.step import Step
from hvdtrain.core.task import Batch, Task
from hvdtrain.insight.tracking import gauges
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.loop.hooks import Hook
from hvdtrain.tasks.text import model as berts
from hvdtrain.tasks.text.task import MaskedWords
from hvdtrain.tasks.vision import models
from hvdtrain.tasks.vision.augment import Augmentations
from hvdtrain.tasks.vision.images import Images
from hvdtrain.tasks.vision.settings import RECIPES, EffnetSettings, resolve
from hvdtrain.tasks.vision.task import ImageTask

WARMUP_STEPS = 6
BATCHES = 4  # used in turn
CLASSES = 10
LR = 0.01
# Recipe `scaled` without features that the others lack; agreement, guards, watchdog, reports and files stay on.
OURS = f"--run r --lr {LR} --compression none --augment none --label-smoothing 0 --ema-epochs 0".split()
VOCABULARY, MASK = 4096, 4  # of a BERT: words come after the mask
HIDDEN = (2144,) * 5  # of an MLP of 25 million parameters, which is bound by communication


@dataclass(frozen=True, kw_only=True)
class Given:
    """The training that all sides run."""

    model: str  # mlp, one of hvdtrain.tasks.vision.models, or a BERT over masked words, which only ours trains
    batch: int  # samples per rank and step
    steps: int  # timed ones, after the warm-up
    pixels: int = 32
    tokens: int = 64  # the longest of a BERT's sequences; the shortest has half as many
    precision: str = "tf32"  # or bf16, or for ours fp32 or fp16
    compiled: bool = False
    warmup: int = WARMUP_STEPS

    def network(self) -> nn.Module:
        """Return the model for (N, 3, H, W) images or for words, equal on all ranks."""
        torch.manual_seed(0)
        if is_text(self.model):
            return berts.BertForMaskedLM(berts.sizes_of(self.model, vocabulary=VOCABULARY))
        if self.model != "mlp":
            built: nn.Module = models.build(self.model, classes=CLASSES)
            return built
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise((3 * self.pixels**2, *HIDDEN)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], CLASSES))

    def tensors(self, device: torch.device, rank: int, layout: torch.memory_format) -> list[tuple[Tensor, Tensor]]:
        """Return the rank's batches: images (N, 3, H, W) of mean 0 and deviation 1, and labels (N,)."""
        draw, size = torch.Generator().manual_seed(rank), (self.batch, 3, self.pixels, self.pixels)
        made = [
            (torch.randn(size, generator=draw), torch.randint(CLASSES, size[:1], generator=draw))
            for _ in range(BATCHES)
        ]
        return [(images.to(device, memory_format=layout), labels.to(device)) for images, labels in made]


def is_text(model: str) -> bool:
    """Return whether the model is a BERT."""
    return model.startswith("bert")


def fast_kernels() -> None:
    """Enable the kernels that hvdtrain lets a GPU use."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


class StepClock:
    """Records when each step began: by the host's clock, or by the GPU's, which the host does not wait for."""

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.device, self.warmup = device, warmup
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record that a step begins, or that the last one has ended."""
        if self.device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def step_s(self) -> list[float]:
        """Return the seconds of the steps after the warm-up."""
        pairs = itertools.pairwise(self._marks)
        if self.device.type != "cuda":
            return [end - start for start, end in pairs][self.warmup :]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1000 for start, end in pairs][self.warmup :]


class GivenImages(ImageTask):
    """Images that need no preparation: a few batches in turn."""

    def __init__(self, given: Given, device: torch.device, rank: int, split: Resident) -> None:
        zero, one = (0.0,) * 3, (1.0,) * 3
        shape: Any = {"classes": CLASSES, "height": given.pixels, "mean": zero, "std": one, "is_mirrorable": True}
        images = Images(train=split, test=split, **shape)
        super().__init__(images, Augmentations(), seed=0, device=device, memory_format=torch.channels_last)
        self._batches = given.tensors(device, rank, torch.channels_last)
        self._turns = itertools.cycle(self._batches)

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        """Return the next batch in training; a trial or an evaluation takes no turn."""
        images, labels = self._batches[0] if epoch is None else next(self._turns)
        return {"images": images[: len(samples)], "labels": labels[: len(samples)]}


def given_words(given: Given, count: int, test_count: int) -> tuple[Task, Resident, Resident]:
    """Return masked words, and sequences for training and testing."""
    draw = torch.Generator().manual_seed(0)

    def split(size: int) -> Resident:
        lengths = torch.linspace(given.tokens // 2, given.tokens, size).long()
        words = torch.randint(MASK + 1, VOCABULARY, (size, given.tokens), generator=draw)
        return Resident(tokens=words.where(torch.arange(given.tokens) < lengths[:, None], 0), lengths=lengths)

    train = split(count)
    task = MaskedWords(train.tensors["lengths"], seed=0, mask_id=MASK, vocabulary=VOCABULARY)
    return task, train, split(test_count)


def our_training(run: hvdtrain.Run[EffnetSettings], given: Given, *hooks: Hook) -> hvdtrain.Training:
    """Return a run of hvdtrain over the given tensors; its epoch is the warm-up and the timed steps."""
    ranks = run.ranks.data.size
    steps = given.warmup + given.steps
    samples = steps * given.batch * run.settings.accumulate_steps * ranks
    task: Task
    if is_text(given.model):
        task, train, test = given_words(given, samples, given.batch * ranks)
    else:
        train, test = (Resident(labels=torch.zeros(count)) for count in (samples, given.batch * ranks))
        task = GivenImages(given, run.device, run.ranks.data.rank, train)
    blocks: Callable[[Any], Blocks] = berts.blocks if is_text(given.model) else models.blocks
    cuts = None if given.model == "mlp" else lambda model: hvdtrain.Cuts(blocks=blocks(model))
    training = run.training(given.network, task, train, test, cuts=cuts, about={"classes": CLASSES})
    assert training._loop.feed.sizes.steps_per_epoch == steps
    training._loop.hooks = [*training._loop.hooks, *hooks]
    return training


def start(given: Given, words: Sequence[str], main: Callable[[hvdtrain.Run[EffnetSettings]], None]) -> None:
    """Run one rank of hvdtrain with these options; end the process."""
    compiled = ["--compile"] if given.compiled else []
    shared = ["--batch-size-per-rank", str(given.batch), "--precision", given.precision, *compiled]
    sys.argv = [sys.argv[0], "--epochs", "1", *OURS, *shared, *words]
    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def sent_bytes() -> int:
    """Return what this host has sent over all interfaces except the loopback since it started."""
    return sum(one.bytes_sent for name, one in psutil.net_io_counters(pernic=True).items() if name != "lo")


def kept_mib(step: Step) -> dict[str, float]:
    """Return what parameters, optimizer and average of this rank keep, MiB."""
    states = [one for held in step.optimizer.state.values() for one in held.values() if isinstance(one, Tensor)]
    average = [] if step.average is None else step.average._averages  # type: ignore[attr-defined]
    kinds = {"parameters": list(step.model.parameters()), "optimizer": states, "average": average}
    return {f"{kind}_mib": sum(one.nbytes for one in tensors) / 2**20 for kind, tensors in kinds.items()}


def pss_mib() -> float:
    """Return this process's share of the memory (PSS), MiB."""
    [pss] = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    return int(pss.split()[1]) / 1024


class Marks(Hook):
    """Marks the steps; counts sent bytes in the timed ones, and on a CPU the operations of the one before the last."""

    def __init__(self, clock: StepClock, *, counts: bool) -> None:
        self._clock, self._counts, self._sent = clock, counts, 0
        self.operations = Operations()  # type: ignore[no-untyped-call]

    def begin_step(self, number: int) -> None:
        if self._counts and number == self._clock.warmup:
            self.operations.__enter__()  # type: ignore[no-untyped-call]
        if number == self._clock.warmup + 1:
            if self._counts:
                self.operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._sent = sent_bytes()
        self._clock.mark()

    def epoch_trained(self, count: int) -> None:
        self._clock.mark()
        self.sent_mb = (sent_bytes() - self._sent) / 1e6
        self.pss_mib = pss_mib()  # before the evaluation and the last checkpoint


def ours(out: Path, *, words: Sequence[str] = (), **shared: Any) -> None:
    """Run one rank of hvdtrain, with these further options of hvdtrain.effnet; memory is that of each rank."""
    given = Given(**shared)

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        counts = run.device.type == "cpu" and not given.compiled
        marks = Marks(clock := StepClock(run.device, given.warmup), counts=counts)
        training = our_training(run, given, marks)
        fast_kernels()  # those of a longer run
        for event in training:
            if isinstance(event, hvdtrain.Report) and event.skipped:
                sys.exit(f"steps were skipped, so their times are not comparable: {event.skipped}")
        pss = {"pss_mib": marks.pss_mib, "pss_at_end_mib": pss_mib()}
        memory = run.ranks.allgather({**gauges.process_peaks(run.device), **kept_mib(training.step), **pss})
        operations = run.ranks.allgather(marks.operations.count)
        if run.ranks.rank == 0:
            answer = {"step_s": clock.step_s(), "memory": memory, "sent_mb": marks.sent_mb, "operations": operations}
            out.write_text(json.dumps(answer))

    start(given, words, main)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of recipe `scaled`, as a peer makes it."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)


def in_users_form(model: nn.Module) -> nn.Module:
    """Return the model with torch's and torchvision's own modules: convolution, in-place activation, excitation."""
    for module in model.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = True
        if isinstance(module, torchvision.ops.SqueezeExcitation):
            module.__class__ = torchvision.ops.SqueezeExcitation
        if isinstance(module, nn.Conv2d):
            module.__class__ = nn.Conv2d
    return model


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One rank of a peer, with the kernels that hvdtrain lets a GPU use."""

    given: Given
    rank: int = 0
    local_rank: int = 0
    layout: torch.memory_format = torch.channels_last

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def network(self) -> nn.Module:
        """Return equal weights in a user's usual form: torchvision's own modules, with in-place activations."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        fast_kernels()
        model: nn.Module = self.given.network().to(self.device, memory_format=self.layout)  # type: ignore[call-overload]
        in_users_form(model)
        if self.given.compiled:
            model.compile()
        return model.train()

    def shortest_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return a step that only trains, over the rank's tensors in turn."""
        turns = itertools.cycle(self.given.tensors(self.device, self.rank, self.layout))

        def step() -> None:
            images, labels = next(turns)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.given.precision == "bf16"):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def answer(self, out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take all steps; rank 0 writes."""
        clock, step = StepClock(self.device, self.given.warmup), self.shortest_step(model, optimizer)
        for _ in range(self.given.warmup + self.given.steps):
            clock.mark()
            step()
        clock.mark()
        if self.rank == 0:
            out.write_text(json.dumps({"step_s": clock.step_s(), "memory": [gauges.process_peaks(self.device)]}))


def plain(out: Path, **shared: Any) -> None:
    """Plain PyTorch in one process."""
    peer = Peer(given=Given(**shared))
    model = peer.network()
    peer.answer(out, model, optimizer_of(model))


def ddp(out: Path, **shared: Any) -> None:
    """DistributedDataParallel under torchrun, tuned for speed as an expert would.

    Each rank keeps its own batch-norm statistics, as in hvdtrain: the default would broadcast rank 0's at every step.
    """
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    peer = Peer(given=Given(**shared), rank=distributed.get_rank(), local_rank=int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(
        peer.network(),
        device_ids=[peer.local_rank] if on_gpu else None,
        gradient_as_bucket_view=True,
        static_graph=True,
        broadcast_buffers=False,
    )
    peer.answer(out, model, optimizer_of(model))
    distributed.destroy_process_group()


def naive_horovod(out: Path, **shared: Any) -> None:
    """Horovod in the loop of its README; not in channels_last, since Horovod rejects such kernels."""
    import horovod.torch as hvd

    hvd.init()
    layout = torch.contiguous_format
    peer = Peer(given=Given(**shared), rank=hvd.rank(), local_rank=hvd.local_rank(), layout=layout)
    model = peer.network()
    optimizer = optimizer_of(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    peer.answer(out, model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()))
    hvd.shutdown()
