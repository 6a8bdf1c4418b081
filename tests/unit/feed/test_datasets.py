from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hvdtrain.core.settings import FileSettings
from hvdtrain.feed.datasets import Loaded, as_split, collate
from hvdtrain.feed.feed import Resident
from hvdtrain.feed.readers import Readers
from hvdtrain.ranks.comm import SerialComm
from tests.refusals import refused, require_facts
from tests.steps import CPU

INPUTS, TARGETS = torch.arange(10.0)[:, None], torch.arange(10) % 3
NO_PROCESSES = FileSettings(prefetch=0)


def split_of(data, settings=NO_PROCESSES):
    return as_split(data, settings, SerialComm())


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(INPUTS)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (INPUTS, ["inputs"]),
        ([INPUTS, TARGETS], ["inputs", "targets"]),
        (TensorDataset(INPUTS, TARGETS), ["inputs", "targets"]),
        ({"x": INPUTS, "y": TARGETS}, ["x", "y"]),
    ],
)
def test_tensors_live_on_the_device(data, names):
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
    ],
)
def test_what_has_samples_by_number_is_read_one_by_one(data):
    split = split_of(data)
    assert isinstance(split, Loaded)
    assert (len(split), split.readers, split.reads_files) == (10, 0, True)
    tensors = split_of((INPUTS, TARGETS))
    assert batches(split, [9, 0], [4]) == batches(tensors, [9, 0], [4])


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
    monkeypatch.setattr("hvdtrain.feed.readers.count_host_cores", lambda _: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))  # torch warns of more workers than cores
    comm = SimpleNamespace(local_size=local_size)
    assert as_split(Samples(1), settings, comm).readers == workers


def test_where_nothing_is_read_ahead_no_process_is_started():
    assert Readers(Samples(1), collate, workers=2, prefetch=0).processes == 0


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (Stream(), "Stream: its samples have no numbers. Use tensors, or a Dataset with __getitem__ and __len__: "),
        (None, "NoneType: its samples have no numbers. "),
        (Samples((1, 2, 3)), "a sample of 3 values without names: ... dict"),
        ({}, "tensors of a split: ... there are none"),
        ((INPUTS, TARGETS[:7]), "tensors of a split: ... inputs has 10, targets has 7"),
        ({"x": INPUTS, "y": np.zeros(10)}, "'y' is ndarray: ... torch.as_tensor"),
        ((torch.tensor(1.0),), "'inputs' is a scalar: ... torch.as_tensor"),
        (Samples({"text": "words"}), "'text' is list: ... torch.as_tensor"),
    ],
)
def test_what_ranks_cannot_take_their_parts_of_is_refused(data, line):
    require_facts(refused(lambda: split_of(data)), line)
