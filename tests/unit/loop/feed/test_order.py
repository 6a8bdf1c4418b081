import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.loop.feed.order import cut, distribute, permutation, rank_batches, shard


def same_cost(samples):
    return torch.ones(len(samples))


def batches_of(order, global_batch, rank, size, micro_batch=1000):
    return rank_batches(
        order,
        global_batch=global_batch,
        micro_batch=micro_batch,
        rank=rank,
        size=size,
        counts=same_cost,
        cost=same_cost,
    )


def samples_of(batch):
    return torch.cat(batch.indices)


FEW = settings(max_examples=25)
samples_counts = st.integers(1, 300)
global_batches = st.integers(1, 80)
sizes = st.integers(1, 9)


@FEW
@given(count=st.integers(0, 500), size=sizes)
def test_shares_tile_the_whole_and_differ_by_at_most_one(count, size):
    parts = [list(range(count))[shard(count, rank, size)] for rank in range(size)]
    assert [one for part in parts for one in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@FEW
@given(samples=samples_counts, global_batch=global_batches, size=sizes)
def test_ranks_share_each_global_batch_evenly_and_in_its_order(samples, global_batch, size):
    order = permutation(samples, seed=1, epoch=2)
    alone = batches_of(order, global_batch, 0, 1)
    ranks = [batches_of(order, global_batch, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([samples_of(batch) for batch in alone]), order)
    for whole, *parts in zip(alone, *ranks, strict=True):
        lengths = [len(samples_of(part)) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert {part.global_size for part in parts} == {part.global_count for part in parts} == {sum(lengths)}
        assert torch.equal(torch.cat([samples_of(part) for part in parts]), samples_of(whole))


@FEW
@given(samples=samples_counts, global_batch=global_batches)
def test_an_epoch_is_cut_evenly_into_as_few_batches_as_their_size_allows(samples, global_batch):
    lengths = [batch.stop - batch.start for batch in cut(samples, global_batch)]
    assert sum(lengths) == samples
    assert len(lengths) == -(-samples // global_batch)
    assert max(lengths) <= global_batch
    assert max(lengths) - min(lengths) <= 1


@FEW
@given(samples=samples_counts, global_batch=global_batches, size=sizes, at_most=st.integers(1, 30))
def test_micro_batches_are_as_few_as_their_size_allows_and_as_many_at_every_step_of_every_rank(
    samples, global_batch, size, at_most
):
    order = permutation(samples, seed=1, epoch=2)
    ranks = [batches_of(order, global_batch, rank, size, at_most) for rank in range(size)]
    [passes] = {len(batch.indices) for batches in ranks for batch in batches}
    largest = max(len(samples_of(batch)) for batches in ranks for batch in batches)
    assert (passes - 1) * at_most < largest <= passes * at_most
    for batches in ranks:
        shapes = {len(part) for batch in batches for part in batch.indices}
        assert max(shapes) <= at_most
        assert len(shapes) <= 2  # a compiled model is compiled for each


def test_an_epoch_of_which_nothing_is_left_has_no_batches():
    assert list(batches_of(torch.arange(0), 8, 0, 2)) == []


def test_permutation_repeats_and_differs_by_seed_and_epoch():
    first = permutation(100, seed=3, epoch=1)
    assert sorted(first.tolist()) == list(range(100))
    assert torch.equal(first, permutation(100, seed=3, epoch=1))
    for seed, epoch in ((3, 2), (4, 1), (1, 3)):
        assert not torch.equal(first, permutation(100, seed=seed, epoch=epoch))


# --- samples that do not weigh or cost the same


@FEW
@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=60), size=sizes)
def test_samples_of_unequal_cost_are_dealt_out_each_once_and_evenly(costs, size):
    samples, cost = torch.arange(len(costs)) + 7, torch.tensor(costs)
    parts = [distribute(samples, cost, rank=rank, size=size) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == samples.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    sums = [cost[part - 7].sum().item() for part in parts]
    assert max(sums) - min(sums) <= max(costs)


def test_a_batch_is_divided_by_what_its_samples_weigh():
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    batches = [
        rank_batches(
            torch.arange(6),
            global_batch=4,
            micro_batch=2,
            rank=rank,
            size=2,
            counts=lambda samples: weights[samples],
            cost=same_cost,
        )
        for rank in range(2)
    ]
    assert [[batch.global_count for batch in of_rank] for of_rank in batches] == [[6.0, 15.0]] * 2
