from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.core.phases import OFF
from hvdtrain.core.position import Position
from hvdtrain.insight.profiling.clocks import HostClock
from hvdtrain.loop.feed.feed import Feed, Resident, copied, prefetched
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.vision.augment import Augmentations
from hvdtrain.tasks.vision.task import ImageTask
from tests.ranks import Rank
from tests.steps import CPU, images_of, split, task_of


def test_a_resident_split_gives_the_images_of_the_indices_in_their_order():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 2)
    split = Resident(images=images, labels=torch.arange(5) * 10)
    batches = list(split.batches([torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64)], CPU, 0))
    assert [batch["labels"].tolist() for batch in batches] == [[40, 0], []]
    assert [tuple(batch["images"].shape) for batch in batches] == [(2, 3, 2, 2), (0, 3, 2, 2)]
    assert batches[0]["images"][:, 0, 0, 0].tolist() == [4, 0]
    assert {batch["images"].dtype for batch in batches} == {torch.uint8}


# --- an epoch that goes on

EPOCH = 53
FEW = settings(max_examples=25)


def feed_of(global_batch, rank=0, size=1, **more):
    """Micro-batches of at most 4."""
    sizes = BatchSizes(micro_batch=4, global_batch=global_batch, steps_per_epoch=-(-EPOCH // global_batch))
    images = split(EPOCH, side=4)
    task = task_of(replace(images_of(images, images), height=4))
    return Feed(images, task, Rank(rank, size), sizes, seed=0, device=CPU, **more)


def visits(batches):
    return [[part.tolist() for part in batch.indices] for batch in batches]


@pytest.mark.parametrize(("max_steps", "taken"), [(1, 0), (9, 3), (10, 5), (40, 6)])
def test_the_epochs_of_a_run_of_so_many_steps_are_those_in_which_it_takes_them(max_steps, taken):
    """Of 5 steps each until so many are taken, then of 9."""
    feed, position, epochs = feed_of(12), Position(), 0
    while position.step < max_steps or position.visited:
        left = feed.batches(position).places[: max_steps - position.step]
        if position.step < taken <= position.step + len(left):
            ends = left[taken - position.step - 1].stop
            feed = feed_of(6)
            position = feed.align(replace(position, step=taken, visited=ends))
            epochs = feed.epochs(position, max_steps)
            continue
        epochs = epochs or feed.epochs(position, max_steps)
        position = Position(step=position.step + len(left), epoch=position.epoch + 1)
        assert feed.epochs(position, max_steps) == epochs
    assert (position.step, position.epoch) == (max_steps, epochs)


@FEW
@given(global_batch=st.integers(2, 60), steps=st.integers(0, 30))
def test_with_the_same_batch_it_goes_on_as_if_it_had_never_stopped(global_batch, steps):
    feed = feed_of(global_batch)
    whole = feed.batches(Position())
    steps = min(steps, len(whole))
    position = Position(visited=sum(batch.global_size for batch in whole[:steps]))
    assert feed.align(position) == position
    assert visits(feed.batches(position)) == visits(whole[steps:])


@FEW
@given(first=st.integers(2, 60), second=st.integers(2, 60), third=st.integers(2, 60), data=st.data())
def test_with_another_batch_what_is_left_is_cut_evenly_and_each_image_is_seen_once(first, second, third, data):
    """Twice on the way, with the last batch once more where the run was stopped a third time."""
    position, seen = Position(), []
    for global_batch in (first, second, third, third):
        feed = feed_of(global_batch)
        position = feed.align(position)
        left = feed.batches(position)
        lengths = [batch.global_size for batch in left]
        assert sum(lengths) == EPOCH - position.visited
        assert not lengths or max(lengths) <= global_batch
        assert not lengths or max(lengths) - min(lengths) <= 1
        taken = left[: data.draw(st.integers(0, len(left)))]
        seen += [sample for batch in visits(taken) for part in batch for sample in part]
        visited = position.visited + sum(batch.global_size for batch in taken)
        position = Position(visited=visited, cut_from=position.cut_from)
    rest = feed_of(third).batches(position)
    seen += [sample for batch in visits(rest) for part in batch for sample in part]
    assert sorted(seen) == list(range(EPOCH))


def test_what_is_left_after_a_change_is_cut_where_the_change_was():
    """32 images by 10 are four batches of 8, also for whoever goes on after the second of them."""
    position = feed_of(10).align(Position(visited=21))
    assert position.cut_from == 21
    assert [batch.global_size for batch in feed_of(10).batches(position)] == [8, 8, 8, 8]
    later = Position(visited=37, cut_from=21)
    assert feed_of(10).align(later) == later
    assert [batch.global_size for batch in feed_of(10).batches(later)] == [8, 8]


# --- to the device


class Crossings(TorchDispatchMode):
    """Notes the operations between two devices, for each of which a host may have to wait."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        touched = {leaf.device for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        if len(touched) > 1:
            self.found.append(str(function))
        return out


class Files(Resident):
    """As if read from files: by indices on the host."""

    reads_files = True

    def batches(self, indices, device, epoch, phases=OFF):
        for samples in indices:
            assert samples.device == CPU
            yield {
                name: torch.empty((len(samples), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
                for name, tensor in self.tensors.items()
            }


@pytest.mark.parametrize("kind", [Resident, Files])
def test_after_the_first_batch_of_an_epoch_nothing_of_its_order_goes_to_the_device(kind):
    """The meta device stands for a GPU: an operation that reads its values fails by itself."""
    meta, images = torch.device("meta"), kind(**split(EPOCH).tensors)
    every = Augmentations(crop=True, flip=True, cutout=4)
    task = ImageTask(images_of(images, images), every, seed=0, device=meta)
    sizes = BatchSizes(micro_batch=4, global_batch=8, steps_per_epoch=7)
    feed = Feed(images, task, SerialComm(), sizes, seed=0, device=meta)
    for epoch in range(2):
        coming = (one for _, parts in feed.micro_batches(feed.batches(Position()), epoch) for one in parts)
        with Crossings() as at_first:
            next(coming)
        assert at_first.found
        with Crossings() as later:
            rest = list(coming)
        assert len(rest) == 13
        assert {tensor.device for batch in rest for tensor in batch.values()} == {meta}
        assert later.found == []


class Copied(torch.Tensor):
    """A tensor of batch `number` that notes what is done with it."""

    def __new__(cls, number, notes):
        made = super().__new__(cls)
        made.number, made.notes = number, notes
        return made

    def to(self, device, *, non_blocking):
        self.notes.append(("copy", self.number, non_blocking))
        return self

    def record_stream(self, stream):
        self.notes.append(("record", self.number, stream))


class Computing:
    """The stream that computes."""

    def __init__(self, notes):
        self.notes = notes

    def wait_stream(self, stream):
        self.notes.append(("wait", stream))


def test_a_batch_that_is_not_prefetched_is_copied_when_it_is_asked_for():
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield {"images": torch.full((2,), number), "labels": torch.ones(2)}

    coming = copied(batches(), torch.device("meta"))
    for number in range(3):
        assert {name: (one.device.type, len(one)) for name, one in next(coming).items()} == {
            "images": ("meta", 2),
            "labels": ("meta", 2),
        }
        assert read == list(range(number + 1))
    assert list(coming) == []


def test_a_prefetched_batch_is_waited_for_and_kept_before_it_is_used(monkeypatch):
    """The order of the calls alone; tests/gpu shows that they are enough."""
    notes, count = [], 3
    computing = Computing(notes)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    batches = ({"images": Copied(number, notes)} for number in range(count))
    for batch in prefetched(batches, torch.device("cuda", 0), "copies"):
        notes += [("use", batch["images"].number)]
    for number in range(count):
        mine = [notes.index(note) for note in (("record", number, computing), ("use", number))]
        copied = notes.index(("copy", number, True))
        assert ("wait", "copies") in notes[copied : mine[0]]
        assert mine == sorted(mine)
        if number + 1 < count:  # the next one is on its way meanwhile
            assert notes.index(("copy", number + 1, True)) < mine[1]
    assert notes.count(("wait", "copies")) == count


# --- steps that are not all taken alike


class InTurns(HostClock):
    """A clock of 2 steps, then 3 of another kind, then 2..."""

    def __init__(self):
        super().__init__()
        self.done = 0

    isolated = property(lambda self: self.done % 5 >= 2)
    uniform_steps = property(lambda self: (5 if self.isolated else 2) - self.done % 5)

    def end_step(self):
        super().end_step()
        self.done += 1


def labels_of(feed, at_step=lambda: None):
    """Those of each micro-batch of each step of an epoch."""
    found = []
    for _, parts in feed.micro_batches(feed.batches(Position()), 0):
        found.append([part["labels"].tolist() for part in parts])
        at_step()
    return found


def test_a_split_is_asked_for_what_belongs_together_and_gives_the_same_batches(monkeypatch):
    asked, clock = [], InTurns()
    batches = Resident.batches

    def noting(self, indices, device, epoch, phases=OFF):
        asked.append((phases.isolated, len(indices)))
        return batches(self, indices, device, epoch, phases)

    plain = labels_of(feed_of(8))
    monkeypatch.setattr(Resident, "batches", noting)
    assert labels_of(feed_of(8, phases=clock), at_step=clock.end_step) == plain
    assert len(plain) == 7
    assert asked == [(False, 2 * 2), (True, 3 * 2), (False, 2 * 2)]  # of two micro-batches a step
