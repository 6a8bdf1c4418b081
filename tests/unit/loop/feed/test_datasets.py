from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from hvdtrain.core.settings import FileSettings
from hvdtrain.loop.feed.datasets import Loaded, as_split, as_test_split, collate
from hvdtrain.loop.feed.feed import Resident, moved
from hvdtrain.loop.feed.readers import Readers
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.steps import CPU

INPUTS, TARGETS = torch.arange(10.0)[:, None], torch.arange(10) % 3
NO_PROCESSES = FileSettings(prefetch=0)


def split_of(data, settings=NO_PROCESSES):
    return as_split(data, settings, SerialComm(), seed=0)


def batches(split, *indices):
    wanted = [torch.tensor(samples, dtype=torch.int64) for samples in indices]
    return [{name: values.tolist() for name, values in one.items()} for one in split.batches(wanted, CPU, None)]


class Samples:
    """Map-style without torch's base class, as other libraries have them."""

    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


Named, Pair = namedtuple("Named", "row kind"), namedtuple("Pair", "targets inputs")


@dataclass
class PairOfLists:
    inputs: list
    targets: int


@dataclass
class Row:
    row: object
    kind: object


class Table:
    """A table with named columns, which hold arrays, as pandas and polars have it."""

    def __init__(self, **columns):
        self.content, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self.content[name]

    def __len__(self):
        return len(self.content[self.columns[0]])

    def __array__(self, dtype=None, copy=None):
        return np.stack(list(self.content.values()), 1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(INPUTS)


def columns_of(inputs, targets):
    return {"inputs": inputs, "targets": targets}


def loader_of(*columns):
    return DataLoader(TensorDataset(*columns))


class Unsized(Dataset):
    def __getitem__(self, index):
        return INPUTS[index]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (INPUTS, ["inputs"]),
        ([INPUTS, TARGETS], ["inputs", "targets"]),
        (TensorDataset(INPUTS, TARGETS), ["inputs", "targets"]),
        ({"x": INPUTS, "y": TARGETS}, ["x", "y"]),
        (INPUTS.numpy(), ["inputs"]),
        ((INPUTS.numpy(), TARGETS.tolist()), ["inputs", "targets"]),
        ([INPUTS.tolist(), TARGETS.tolist()], ["inputs", "targets"]),
        ({"x": INPUTS.numpy()[::-1].astype(">f4")[::-1], "y": [np.int64(3)] * 10}, ["x", "y"]),
        (Named(row=INPUTS, kind=TARGETS.numpy()), ["row", "kind"]),
        (Row(row=INPUTS.tolist(), kind=TARGETS), ["row", "kind"]),
        (Table(row=INPUTS.numpy(), kind=TARGETS.numpy()), ["row", "kind"]),
        ({"row": np.array([*INPUTS.numpy(), None], dtype=object)[:10]}, ["row"]),  # an object for each sample
    ],
)
def test_columns_live_on_the_device(data, names):
    split = split_of(data)
    assert split_of(split) is split
    assert (type(split), len(split)) == (Resident, 10)
    [batch] = batches(split, [3, 1])
    assert list(batch) == names
    assert batch[names[0]] == [[3.0], [1.0]]


@pytest.mark.parametrize(
    "data",
    [
        Samples(*((INPUTS[index], int(TARGETS[index])) for index in range(10))),
        [{"inputs": np.array([index], dtype=np.float32), "targets": index % 3} for index in range(10)],
        Subset(TensorDataset(INPUTS, TARGETS), range(10)),
        [(row, index % 3) for index, row in enumerate(INPUTS.tolist())],
        [Pair(targets=index % 3, inputs=row) for index, row in enumerate(INPUTS)],
        [PairOfLists([float(index)], index % 3) for index in range(10)],
        DataLoader(Subset(TensorDataset(INPUTS, TARGETS), range(10)), 4),
    ],
)
def test_what_has_samples_by_number_is_read_one_by_one(data):
    split = split_of(data)
    assert isinstance(split, Loaded)
    assert (len(split), split.readers, split.reads_files) == (10, 0, True)
    tensors = split_of((INPUTS, TARGETS))
    assert batches(split, [9, 0], [4]) == batches(tensors, [9, 0], [4])


def test_texts_and_dicts_of_samples_are_lists_whose_tensors_are_on_the_device():
    rows = [{"x": INPUTS[index], "name": f"file {index}", "boxes": {"at": INPUTS[:index]}} for index in range(4)]
    full, empty = split_of(rows).batches([torch.tensor([2, 1]), torch.tensor([], dtype=torch.int64)], CPU, None)
    assert full["name"] == ["file 2", "file 1"]
    assert [len(boxes["at"]) for boxes in full["boxes"]] == [2, 1]
    assert (len(empty["x"]), empty["name"], empty["boxes"]) == (0, [], [])
    on_meta = moved(full, torch.device("meta"))
    assert (on_meta["x"].device.type, on_meta["boxes"][0]["at"].device.type) == ("meta", "meta")


@pytest.mark.parametrize(
    "form", [lambda *both: Samples(*zip(*both, strict=True)), TensorDataset, columns_of, loader_of]
)
def test_test_sets_by_name_are_one_split_with_the_samples_of_each(form):
    near, far = form(INPUTS[:3], TARGETS[:3]), form(INPUTS[3:], TARGETS[3:])
    split, sets = as_test_split({"near": near, "far": far}, NO_PROCESSES, SerialComm(), seed=0)
    assert sets == {"near": range(3), "far": range(3, 10)}
    assert batches(split, [2, 9]) == batches(split_of((INPUTS, TARGETS)), [2, 9])
    assert as_test_split(near, NO_PROCESSES, SerialComm(), seed=0)[1] == {"": range(3)}


@pytest.mark.parametrize(
    ("far", "line"),
    [
        ({"x": INPUTS}, "test sets near, far: ... different names"),
        (Samples(1), "test sets: near is a dict, far is a Samples. Use Datasets"),
        (Stream(), "test sets: near is a dict, far is a Stream. "),
    ],
)
def test_test_sets_that_do_not_fit_together_are_refused(far, line):
    sets = {"near": columns_of(INPUTS, TARGETS), "far": far}
    require_facts(refused(lambda: as_test_split(sets, NO_PROCESSES, SerialComm(), seed=0)), line)


def test_a_rank_without_samples_gets_an_empty_batch_of_the_same_names():
    split = split_of(Samples((INPUTS[0], 1), (INPUTS[1], 2)))
    empty, full = split.batches([torch.tensor([], dtype=torch.int64), torch.tensor([1])], CPU, None)
    assert {name: (tuple(one.shape), one.dtype) for name, one in empty.items()} == {
        "inputs": ((0, 1), torch.float32),
        "targets": ((0,), torch.int64),
    }
    assert full["targets"].tolist() == [2]


@pytest.mark.parametrize(
    ("settings", "local_size", "workers"),
    [
        (FileSettings(), 2, 2),
        (FileSettings(), 8, 1),
        (FileSettings(workers=3), 2, 3),
        (FileSettings(workers=3, prefetch=0), 2, 0),
    ],
)
def test_ranks_share_the_cores_of_their_host_for_workers(monkeypatch, settings, local_size, workers):
    monkeypatch.setattr("hvdtrain.loop.feed.readers.count_host_cores", lambda _: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))  # torch warns of more workers than cores
    comm = SimpleNamespace(local_size=local_size)
    assert as_split(Samples(1), settings, comm, seed=0).readers == workers


def test_where_nothing_is_read_ahead_no_process_is_started():
    assert Readers(Samples(1), collate, workers=2, prefetch=0).processes == 0


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (Stream(), "Stream: has no __getitem__. Use tensors, or a Dataset with __getitem__ and __len__: ... numbers"),
        (Unsized(), "Unsized: has no __len__. "),
        (Samples((1, 2, 3)), "a sample of 3 values without names: ... dict or a namedtuple"),
        (DataLoader(Stream()), "Stream: has no __getitem__. "),
        ({}, "tensors of a split: ... there are none"),
        ((INPUTS, TARGETS[:7]), "tensors of a split: ... inputs has 10, targets has 7"),
        ((torch.tensor(1.0),), "'inputs' is a scalar: "),
        (Samples({"kind": "tree"}, {"kind": 3}), "'kind': ... they hold str ... encode text"),
        (Samples({"x": Unsized()}), "'x': ... they hold Unsized"),
        (Samples({"x": 1, "note": None}), "'note': ... they hold NoneType"),
        (Samples({"x": 1}, {"x": 1, "y": 2}), "different names: 'x' and 'x', 'y'. ... all samples the same"),
        ({"inputs": {"ids": INPUTS}, "labels": TARGETS}, "'inputs' has names of its own. ... beside the others"),
        (Samples(*(INPUTS[: 2 + index] for index in range(3))), "'inputs': ... [2, 1] ... [3, 1] ... pad"),
        (Samples((1, [1.0, 2.0]), (1, [1.0])), "'targets': ... [2] ... [1] ... pad"),
        (([[1.0, 2.0], [1.0]], [0, 1]), "'inputs': ... length 2 ... got 1 ... pad"),
        ({"town": np.array(["Ulm", 3], dtype=object)}, "'town': ... they hold str"),
        (Table(town=np.array(["Ulm", "Bonn"])), "'town': ... they hold str_"),
    ],
)
def test_what_ranks_cannot_take_their_parts_of_is_refused(data, line):
    require_facts(refused(lambda: split_of(data)), line)


def pad(samples):
    return samples


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"batch_size": 4, "shuffle": True}, "note: ... TensorDataset: ... not batch_size=4, shuffle. ... --batch-"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "warning: ... SubsetRandomSampler, batch_size=1. ... Subset, "),
        ({"sampler": RandomSampler(range(10), replacement=True)}, "warning: ... RandomSampler"),
        ({"batch_sampler": [[0, 1], [2]]}, "warning: ... batch_sampler list"),
        ({"collate_fn": pad}, "warning: ... collate_fn pad ... in the Dataset"),
        ({"batch_size": 3, "drop_last": True}, "warning: ... drop_last"),
    ],
)
def test_what_is_not_used_of_a_loader_is_printed(capsys, options, line):
    assert len(split_of(DataLoader(TensorDataset(INPUTS), **options))) == 10
    require_facts(capsys.readouterr().err, line)


def test_other_ranks_print_nothing(capsys):
    as_split(DataLoader(TensorDataset(INPUTS)), NO_PROCESSES, Rank(1, 2), seed=0)
    assert capsys.readouterr().err == ""
