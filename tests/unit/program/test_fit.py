from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from hvdtrain.loop.draft import Job
from hvdtrain.program import fit
from hvdtrain.program.fit import HEADROOM, HOST_SHARE, Room, Trial, long_epoch_s, most_that_fit, passes_for
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from tests.ranks import Rank, together
from tests.unit.loop.trainings import begun, same, weights


@pytest.mark.parametrize(("share", "most", "parts"), [(64, 100, 1), (60, 16, 4), (7, 4, 7)])
def test_a_share_is_cut_into_the_fewest_equal_parts_that_fit(share, most, parts):
    assert passes_for(share, most) == parts


@pytest.mark.parametrize(("share", "room", "most", "tried"), [
    (50, 1000, 50, [1, 2, 4, 8, 16, 32, 50]),
    (64, 9, 8, [1, 2, 4, 8, 16]),
    (1, 1, 1, [1]),
])  # fmt: skip
def test_sizes_double_until_memory_ends(share, room, most, tried):
    sizes = []
    assert most_that_fit(SerialComm(), share, lambda size: sizes.append(size) or size <= room) == most
    assert sizes == tried


def test_the_rank_with_the_least_memory_decides_for_all():
    rooms = [100, 5, 30]
    assert together(3, lambda comm: most_that_fit(comm, 64, lambda size: size <= rooms[comm.rank])) == [4, 4, 4]


def test_a_rank_for_which_one_sample_is_too_much_is_named_on_all():
    comm = Rank(0, 2, answers=lambda _: [[True, "one"], [False, "two"]])
    with pytest.raises(BadInput, match="rank 1 on two"):
        most_that_fit(comm, 8, lambda _: True)


class Unlimited:
    limit = 10**9

    def __init__(self):
        self.asked, self.state_bytes = [], 0

    def has(self, samples, state_bytes):
        self.asked.append(samples)
        self.state_bytes = state_bytes
        return samples <= self.limit

    def took(self, samples):
        pass


def trial_of(room):
    training = begun()
    job: Job = training.job
    return training, Trial(training.step, job, room)


def test_a_trial_leaves_everything_as_it_was_and_takes_a_quarter_more():
    training, trial = trial_of(room := Unlimited())
    other = begun()
    random = torch.get_rng_state()
    assert trial.fits(8)
    assert room.asked == [HEADROOM * 8]
    assert torch.equal(torch.get_rng_state(), random)
    assert same(training, other)
    assert all(parameter.grad is None for parameter in training.step.model.parameters())
    assert trial.fits(100)  # of 53 images


@pytest.mark.parametrize(("shards", "multiple"), [(1, 3), (2, 1)])
def test_a_trial_leaves_room_for_what_the_first_step_allocates(shards, multiple):
    """Gradients and the optimizer's state; ranks that divide this have their buckets of gradients already."""
    training, trial = trial_of(room := Unlimited())
    training.step.slots.how.shards = shards
    assert trial.fits(1)
    assert room.state_bytes == multiple * sum(one.nbytes for one in training.step.model.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: ..."),
    ],
)
def test_memory_that_ends_is_no_error(monkeypatch, error):
    training, trial = trial_of(Unlimited())
    before = weights(training)
    monkeypatch.setattr(training.step.task, "loss", Mock(side_effect=error))
    assert not trial.fits(4)
    assert all(torch.equal(one, other) for one, other in zip(before, weights(training), strict=True))


def test_another_error_is_one(monkeypatch):
    training, trial = trial_of(Unlimited())
    monkeypatch.setattr(training.step.task, "loss", Mock(side_effect=RuntimeError("shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="shapes"):
        trial.fits(4)


def host(folder, mib):
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal: {mib * 1024} kB\n")
    return folder


def test_a_ranks_room_is_its_part_of_the_host(tmp_path):
    root = host(tmp_path, 4000)
    alone, of_two = (Room(Rank(0, size), is_host=True, root=root).limit_bytes for size in (1, 2))
    assert alone <= HOST_SHARE * 4000 * 2**20
    assert of_two <= alone / 2 + 1
    assert Room(SerialComm(), is_host=False, root=root).limit_bytes == float("inf")


def test_a_ranks_room_ends_at_its_own_limit_of_addresses(monkeypatch, tmp_path):
    memory = psutil.Process().memory_info()
    monkeypatch.setattr("resource.getrlimit", lambda _: (memory.vms + 300 * 2**20, -1))
    monkeypatch.setattr("psutil.Process.memory_info", lambda _: memory)
    room = Room(SerialComm(), is_host=True, root=host(tmp_path, 10**9))
    assert room.limit_bytes == HOST_SHARE * (memory.rss + 300 * 2**20)


def test_what_more_samples_take_is_foreseen(monkeypatch, tmp_path):
    room = Room(SerialComm(), is_host=True, root=host(tmp_path, 1000))
    assert room.has(10**9, 0)  # nothing is known yet
    for samples, mib in ((10, 300), (20, 350)):
        monkeypatch.setattr("psutil.Process.memory_info", lambda _, mib=mib: SimpleNamespace(rss=mib * 2**20))
        monkeypatch.setattr("hvdtrain.program.fit._peak_bytes", lambda: 0.0)
        room.took(samples)
    assert room.expected_bytes(40) == 450 * 2**20
    room.limit_bytes = 500 * 2**20
    assert room.has(40, 50 * 2**20)
    assert not room.has(40, 51 * 2**20)
    assert not room.has(80, 0)


# --- how long an epoch takes


@pytest.fixture
def measured(monkeypatch):
    """A function that forecasts on a computer that takes 1 s for a batch, and 5 s more the first time."""
    now = 0.0
    monkeypatch.setattr(fit.time, "perf_counter", lambda: now)

    def epoch_s(batches, comm=None):
        times = []

        def run():
            nonlocal now
            now += 1 + 5 * (not times)
            times.append(now)

        return long_epoch_s(comm or SerialComm(), batches, run), len(times)

    return epoch_s


@pytest.mark.parametrize(("batches", "epoch_s", "times"), [(90, None, 1), (110, None, 2), (900, 900, 2)])
def test_an_epoch_is_as_long_as_its_batches_but_for_the_first_time(measured, batches, epoch_s, times):
    assert measured(batches) == (epoch_s, times)  # even the first time promises that 90 are a short epoch


def test_the_slowest_rank_decides(measured):
    assert measured(500, Rank(0, 2, answers=lambda took_s: [took_s, 3 * took_s]))[0] == pytest.approx(1500)
