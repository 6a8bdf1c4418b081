"""Ranks that divide the optimizer's state among them, against ranks that do not."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.checkpoint import state
from hvdtrain.core.finite import Skipped
from hvdtrain.loop.witnesses.find_nan import FindNan
from hvdtrain.loop.witnesses.skip_spikes import SkipSpikes
from hvdtrain.parallel.sync.settings import SyncSettings
from hvdtrain.parallel.sync.sharded import ShardedSync
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from tests.ranks import Together, together
from tests.refusals import refused, require_facts
from tests.steps import CPU, conv_net, draft_of, same, step_of

LR = 0.05
ONE = torch.tensor([0])
SMALL = 1000 / 2**20  # of a bucket, in MiB


class Ranks(Together):
    """Ranks with the collectives of Horovod that pieces need."""

    def begin_sum(self, values, name):
        return lambda: values.copy_(self.allreduce(values, name))

    def begin_scattered_sum(self, values, name):
        def wait():
            return self.allreduce(values, name).chunk(self.size)[self.rank].clone()

        return wait

    def begin_gather(self, values, name):
        sent = values.clone()
        return lambda: torch.cat(self._exchange(sent))


class Net(nn.Sequential):
    """With kernels in another memory format, a number that is learned, and a frozen layer."""

    def __init__(self):
        super().__init__(*conv_net(channels=24).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self[0].bias.requires_grad_(False)  # its gradients are rounding errors

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


NET = Net()  # made once: ranks are threads, and draw from one generator


class Training:
    """A rank's steps, on batches of its own."""

    def __init__(self, comm, name, *, is_sharded=True, bucket_mb=SMALL, is_half=False, **options):
        self.comm = Ranks(comm.rank, comm._values, comm._meeting)
        self.model = copy.deepcopy(NET)
        groups = optim.parameter_groups(self.model, 5e-4, decay_all=False)
        self.optimizer = optim.BUILD[name](groups, LR)
        self.average = MovingAverage(self.model, horizon_steps=5)
        kind = ShardedSync if is_sharded and comm.size > 1 else BucketSync
        self.how = kind(self.model, self.comm, Wire(comm.size, is_half=is_half), bucket_mb=bucket_mb)
        if kind is ShardedSync:
            self.how.divide(draft_of(self.comm, self.model, self.optimizer, how=self.how, average=self.average))
        options = {"witnesses": [SkipSpikes(CPU)], **options}
        self.step = step_of(
            self.model, comm=self.comm, sync=self.how, optimizer=self.optimizer, average=self.average, **options
        )
        self.parts = state.State(
            comm=self.comm,
            device=CPU,
            seed=0,
            model=self.model,
            average=self.average,
            optimizer=self.optimizer,
            shared={},
            per_rank={},
            how=self.how,
        )

    def run_step(self, number, *, passes=1, poisoned=None):
        """A step; `poisoned` is a parameter whose gradient is infinite in one element on the last rank."""
        generator = torch.Generator().manual_seed(100 * number + self.comm.rank)
        batches = [
            {
                "images": torch.rand(4, 3, 8, 8, generator=generator),
                "labels": torch.randint(0, 10, (4,), generator=generator),
            }
            for _ in range(passes)
        ]
        hook = None
        if poisoned and self.comm.rank == self.comm.size - 1:
            hook = self.model.get_parameter(poisoned).register_hook(
                lambda one: one.clone().index_fill_(0, ONE, torch.inf)
            )
        count = 4.0 * passes * self.comm.size
        done = self.step(batches, backward_passes=passes, global_count=count, lr=LR, measure=True).read()
        if hook is not None:
            hook.remove()
        return done

    def saved(self):
        return state.shared_state(replace(self.parts, optimizer=self.how.whole(self.optimizer)))


def trained(ranks, name, *, steps=4, **options):
    """What each rank has after some steps: weights, what rank 0 saves, and the norms of gradients."""

    def program(comm):
        training = Training(comm, name, **options)
        norms = [training.run_step(number, passes=1 + number % 2).grad_norm for number in range(steps)]
        saved = training.saved()
        return [one.detach() for one in training.model.parameters()], saved, torch.tensor(norms)

    return together(ranks, program)


@pytest.mark.parametrize(
    ("ranks", "name", "options"),
    [
        (2, "sgd", {}),
        (2, "rmsprop", {"clip_value": 1e-3}),
        (2, "adam", {"is_half": True}),
        (2, "adamw", {"bucket_mb": 0.0}),
        (3, "adamw", {"bucket_mb": 0.0}),
        (5, "sgd", {"bucket_mb": 0.0}),  # some ranks have no piece of small parameters
    ],
)
def test_elementwise_optimizers_give_the_bits_and_the_checkpoint_of_ranks_that_divide_nothing(ranks, name, options):
    divided = trained(ranks, name, **options)
    whole = trained(ranks, name, is_sharded=False, **options)
    for (weights, _, norms), (others, _, known) in zip(divided, whole, strict=True):
        assert same(weights, others)
        torch.testing.assert_close(norms, known)
    assert same(divided[0][1], whole[0][1])
    strides = [[one.stride() for one in held.values()] for held in saved_states(divided)]
    assert strides == [[one.stride() for one in held.values()] for held in saved_states(whole)]


def saved_states(ranks):
    return ranks[0][1]["optimizer"]["state"].values()


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_of_layers_are_those_of_whole_layers(name, ranks):
    divided, whole = (trained(ranks, name, is_sharded=one, clip_norm=0.1) for one in (True, False))
    for (weights, saved, _), (others, known, _) in zip(divided, whole, strict=True):
        torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-6)
        assert saved["parameters"] == known["parameters"]


@pytest.mark.parametrize(
    ("before", "after"), [((2, True), (3, True)), ((1, False), (2, True)), ((3, True), (1, False))]
)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_checkpoint_is_continued_by_any_number_of_ranks(name, before, after):
    """By ranks that divide and by ranks that do not, with the same bits."""
    saved = copy.deepcopy(trained(before[0], name, is_sharded=before[1], bucket_mb=0.0)[0][1])

    def program(is_sharded, comm):
        training = Training(comm, name, is_sharded=is_sharded, bucket_mb=0.0)
        state.restore_shared(training.parts, copy.deepcopy(saved))
        again = copy.deepcopy(training.saved())
        training.run_step(7)
        return again, training.saved()

    divided, whole = (together(after[0], partial(program, one)) for one in (after[1], False))
    assert same(divided[0], whole[0])
    assert same(divided[0][0], saved)


@pytest.mark.parametrize("poisoned", ["0.weight", "5.bias"])
def test_all_ranks_skip_a_step_of_which_only_one_part_is_not_finite(poisoned):
    def program(comm):
        training = Training(comm, "adamw", witnesses=[FindNan()])
        training.run_step(0)
        before = copy.deepcopy(training.model.state_dict())
        skipped = training.run_step(1, poisoned=poisoned).skipped
        kept = same(before, dict(training.model.named_parameters()) | before)
        training.run_step(2)
        return skipped, kept, training.saved()

    found = together(3, program)
    assert [skipped for skipped, _, _ in found] == [Skipped(rank=2, source="gradients")] * 3
    assert all(kept for _, kept, _ in found)


def test_each_rank_keeps_its_share():
    def program(comm):
        training = Training(comm, "adamw")
        training.run_step(0)
        states = [value for held in training.optimizer.state.values() for value in held.values() if value.dim()]
        return sum(map(torch.numel, states)), [
            one.untyped_storage().nbytes() for one in training.average.module.parameters()
        ]

    elements = 2 * sum(one.numel() for one in NET.parameters() if one.requires_grad and one.dim())
    found = together(3, program)
    assert sum(kept for kept, _ in found) == elements + 3 * 2 * 2  # and two spares of each rank
    assert max(kept for kept, _ in found) < 0.5 * elements
    assert all(sum(map(bool, sizes)) == 1 for _, sizes in found)  # of the frozen one


def test_weights_of_the_average_that_somebody_holds_outlive_the_next_step():
    """Also as arrays: torch may not change the size of memory that numpy sees, as MPI does."""

    def program(comm):
        training = Training(comm, "adamw")
        training.run_step(0)
        held = {name: one.detach().numpy() for name, one in training.average.model().named_parameters()}
        before = copy.deepcopy(held)
        training.run_step(1)
        return all((held[name] == before[name]).all() for name in held)

    assert together(2, program) == [True, True]


@pytest.mark.parametrize("option", ["shard_optimizer", "sync"])
def test_an_optimizer_that_may_keep_other_state_is_refused(option):
    settings = replace(SyncSettings(), **{option: "local:2" if option == "sync" else True})
    sizes = SimpleNamespace(steps_per_epoch=9)

    def check(kind):
        job = SimpleNamespace(device=torch.device("cpu"), model=nn.Linear(1, 1), sizes=sizes)
        job.optimizer = lambda model: kind(model.parameters())
        return lambda: SyncSettings.check_job(settings, job)

    check(torch.optim.AdamW)()
    require_facts(refused(check(torch.optim.ASGD)), "ASGD ... Leave the option out, or choose one of torch's SGD, ")
