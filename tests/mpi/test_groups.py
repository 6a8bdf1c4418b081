"""--sync two-level and local: groups of ranks, on one host, against a plain loop and through the real programs."""

import itertools

import pytest
import torch
from torch.nn import functional

from hvdtrain.loop.feed.order import cut, permutation, shard
from tests.mpi.conftest import PROGRAMS
from tests.mpi.interrupted import TINY, same_end
from tests.steps import images_of, split

IMAGES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS, LR, CLIP_NORM = 50, 12, 2, 2, 0.05, 1.45


def images():
    """A few at random; on a scale on which a net learns."""
    return images_of(split(IMAGES, side=8), split(4, side=8), is_mirrorable=False)


def net():
    """Without batch norm: the batches of ranks do not matter."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)
    )


class PlainGroup:
    """One group's model in the shortest loop."""

    def __init__(self):
        torch.manual_seed(0)
        self.norms = []
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
        for one in self.model.parameters():
            self.optimizer.state[one]["momentum_buffer"] = torch.zeros_like(one)

    def step(self, samples):
        tensors = images().train.tensors
        self.optimizer.zero_grad()
        pictures = tensors["images"][samples].float() / 255
        functional.cross_entropy(self.model(pictures), tensors["labels"][samples]).backward()
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM).item())
        self.optimizer.step()

    def tensors(self):
        parameters = list(self.model.parameters())
        return [*parameters, *(self.optimizer.state[one]["momentum_buffer"] for one in parameters)]


@torch.no_grad()
def meet(groups):
    for alike in zip(*(group.tensors() for group in groups), strict=True):
        mean = sum(alike) / len(alike)
        for one in alike:
            one.copy_(mean)


def expected(ranks, every_steps, group_size):
    """Weights and momenta of local SGD with clipped gradients, one group after the other."""
    groups = [PlainGroup() for _ in range(ranks // group_size)]
    numbers = itertools.count(1)
    for epoch in range(EPOCHS):
        order = permutation(IMAGES, seed=7, epoch=epoch)
        batches = cut(IMAGES, GLOBAL_BATCH)
        for place, number in zip(batches, numbers, strict=False):
            batch = order[place]
            if not every_steps:
                for group in groups:
                    group.step(batch)
                continue
            for index, group in enumerate(groups):
                own = range(index * group_size, (index + 1) * group_size)
                group.step(torch.cat([batch[shard(len(batch), rank, ranks)] for rank in own]))
            if number % every_steps == 0 or place == batches[-1]:
                meet(groups)
    assert min(groups[0].norms) < CLIP_NORM < max(groups[0].norms)
    parts = groups[0].tensors()
    half = len(parts) // 2
    return [torch.cat([one.detach().flatten() for one in some]) for some in (parts[:half], parts[half:])]


@pytest.mark.parametrize(
    ("ranks", "every_steps", "group_size", "wire"),
    [
        (4, 3, 2, "none"),  # a group of one would hide what is divided by the number of ranks
        (2, 0, 1, "fp16"),
    ],
)
def test_weights_are_those_of_a_plain_loop(run, tmp_path, ranks, every_steps, group_size, *, wire):
    """On the wire fp16 rounds by 2^-11."""
    words = map(str, (PROGRAMS / "group_steps.py", tmp_path, every_steps, group_size, wire))
    done = run("mpirun", ranks, list(words))
    assert done.returncode == 0, done.stderr
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for name, other in itertools.product(of_ranks[0], of_ranks[1:]):
        assert torch.equal(of_ranks[0][name], other[name]), name
    weights, momenta = expected(ranks, every_steps, group_size)
    flat, _ = expected(ranks, 0, group_size)
    bound = 1e-6 if wire == "none" else 1e-3
    assert (of_ranks[0]["weights"] - weights).abs().max() < bound
    assert (of_ranks[0]["momenta"] - momenta).abs().max() < bound
    assert every_steps == 0 or (weights - flat).abs().max() > 1e-4  # what local is, is seen


LOCAL = (*TINY, "--images=640", "--batch-size-per-rank", "64", "--epochs", "2")  # 5 steps an epoch
LOCAL = (*LOCAL, "--sync", "local:3/1")
LOCAL = (*LOCAL, "--checkpoint-every", "1steps", "--report-every-steps", "3")


def test_a_run_is_saved_where_groups_meet_and_goes_on_from_there_with_the_same_bits(runs, reference):
    """They meet after steps 3, 5, 6, 9 and 10; asked to leave in the middle of a round they go on to its end."""
    run = runs(2, LOCAL)
    assert "saved at step 9" in run.asked("step7")
    assert run.checkpoints == ["step-000000006", "step-000000009"]
    run.finish()
    same_end(run, reference(2, LOCAL))


def test_a_group_that_skips_a_step_is_equal_to_the_others_where_they_meet(runs):
    run = runs(2, LOCAL)
    said = run.finish("--check-replicas-every", "2", HVDTRAIN_FAULT="nan@rank1:step1,nan@rank1:step2,nan@rank1:step3")
    assert "step 2: skipped on rank 1, NaN or Inf in the loss of rank 1" in said
    skipped = [(line["step"], line["rank"], line["ranks"]) for line in run.lines if line.get("event") == "skipped"]
    assert skipped == [(step, 1, "rank 1") for step in (1, 2, 3)]
    assert run.result["skipped_steps"] == 3
    assert len(run.weights) == 1
