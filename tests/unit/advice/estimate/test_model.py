"""The model: sums, steps and failures, against numbers worked out by hand and properties that must hold."""

import math
from dataclasses import replace

import pytest

from bench.cases import published
from launch.advice.estimate import failures
from launch.advice.estimate.allreduce import calibrated, cheapest, costs, through
from launch.advice.estimate.hardware import MACHINES, Hardware, parse_link, parse_times
from launch.advice.estimate.helps import helps, ways_s
from launch.advice.estimate.step import RANGE, MeasuredSize, Workload, buckets, predict, sums

A100 = MACHINES["dgx-a100"]
SLOW = Hardware(name="slow", gpus_per_host=2, inside_gb_per_s=10, link_gb_per_s=parse_link("1gbit"))
B4 = Workload(model="b4", unit="images", precision="tf32", batch_per_gpu=64, gradient_bytes=77_366_464)


def told(gpus, speed, per_host=None):
    return (MeasuredSize(gpus=gpus, per_host=per_host or min(gpus, 8), samples_per_s=speed, source="a test"),)


def test_a_large_sum_moves_twice_the_bytes_but_one_part():
    ring, _, two_level = costs(replace(SLOW, start_s=0.0), 4)
    assert ring.s_per_byte == pytest.approx(2 * 3 / 4 / 0.125e9)
    assert two_level.s_per_byte == pytest.approx(1 / 10e9 + 1 / 0.125e9)


def test_the_tree_wins_over_many_hosts_and_the_ring_over_large_sums():
    assert cheapest(costs(A100, 1024), 1e6).algorithm == "tree"
    assert cheapest(costs(SLOW, 4), 1e9).algorithm == "two-level"
    assert {cost.algorithm for cost in costs(A100, 8)} == {"ring"}
    assert costs(A100, 1)[0].seconds(1e9) == 0


def test_the_curve_goes_through_both_sums_of_which_the_larger_must_be_slower():
    times = ((2**20, 1e-4), (2**30, 8e-3))
    curve = through(times)
    assert [curve.seconds(size) for size, _ in times] == pytest.approx([seconds for _, seconds in times])
    with pytest.raises(ValueError, match="not longer"):
        through(((2**20, 1e-3), (2**30, 1e-3)))


@pytest.mark.parametrize("gpus", [8, 32])
def test_measured_sums_come_back_from_the_hardware_that_they_calibrate(gpus):
    curve = through(((2**20, 2e-4), (2**30, 9e-3)))
    machine = calibrated(A100, gpus, ((2**20, 2e-4), (2**30, 9e-3)))
    best = cheapest(costs(machine, gpus), 2**30)
    assert best.seconds(2**30) == pytest.approx(curve.seconds(2**30), rel=0.1)


def test_efficiency_falls_with_the_size_and_the_range_is_wider_where_no_table_checks_it():
    same, *steps = [predict(B4, A100, told(8, 1223), gpus) for gpus in (8, 16, 64, 256, 1024)]
    assert same.samples_per_s == pytest.approx(1223)
    per_gpu = [step.samples_per_s / step.gpus for step in steps]
    assert per_gpu == sorted(per_gpu, reverse=True)
    assert [step.high / step.samples_per_s for step in steps] == pytest.approx([1.15, 1.15, 1.3, 1.3])
    assert [step.samples_per_s / step.low for step in steps] == pytest.approx([1.15, 1.15, 1.3, 1.3])


def test_the_narrow_range_holds_all_published_rows():
    others = (*published.OTHERS, *published.HELD_BACK, *published.HELD_BACK_OTHERS, *published.LARGEST)
    rows = [*published.left_out(published.CHECKED), *(row for table in others for row in published.rows(table))]
    assert [row for row in rows if not 1 / (1 + RANGE) <= row.predicted / row.published <= 1 + RANGE] == []


def test_the_last_bucket_is_never_hidden_and_overlap_hides_the_others():
    one_bucket = replace(B4, bucket_bytes=10**9)
    hidden, exposed = (predict(replace(B4, overlap=share), SLOW, told(2, 20, 2), 8).exposed_s for share in (1.0, 0.0))
    assert hidden < exposed
    assert predict(one_bucket, SLOW, told(2, 20, 2), 8).exposed_s == pytest.approx(
        cheapest(costs(SLOW, 8), B4.gradient_bytes).seconds(B4.gradient_bytes)
    )


def test_a_small_first_bucket_travels_beside_backward_and_leaves_less_for_the_others():
    assert buckets(B4) == (0, 3, B4.gradient_bytes / 3)
    first, count, size = buckets(replace(B4, bucket_bytes=8 << 20, first_bucket_bytes=1 << 20))
    assert (first, count) == (1 << 20, 10)
    assert first + count * size == pytest.approx(B4.gradient_bytes)
    tiny = replace(B4, gradient_bytes=1000, first_bucket_bytes=1 << 20)  # all of it is the last that travels
    assert buckets(tiny) == (0, 1, 1000)


def test_a_rank_on_a_cpu_does_not_train_while_it_sums():
    cpu = replace(SLOW, is_cpu=True, inside_gb_per_s=3.0)
    inside, across = costs(cpu, 2)[0], costs(cpu, 4)[-1]
    assert inside.work_s_per_byte == inside.s_per_byte == pytest.approx(1 / 3e9)
    wire = 1 / 0.125e9 / (1448 / 1514)
    assert across.s_per_byte - across.work_s_per_byte == pytest.approx(wire)
    half = costs(replace(cpu, cores_per_rank=0.5), 4)[-1]
    assert half.work_s_per_byte == pytest.approx(2 * across.work_s_per_byte)
    long = 1e9 * B4.gradient_bytes / 3  # seconds of computation, which hide all that can be hidden
    found = sums(B4, (across,), long)
    earlier_s = 2 / 3 * B4.gradient_bytes * across.work_s_per_byte
    assert found.exposed_s == pytest.approx(across.seconds(B4.gradient_bytes / 3) + earlier_s)


def test_powersgd_takes_a_cpu_longer_with_less_of_a_core():
    cpu = replace(SLOW, is_cpu=True)
    step = predict(B4, cpu, told(2, 20, 2), 4)
    whole, half = (ways_s(B4, replace(cpu, cores_per_rank=cores), step) for cores in (1.0, 0.5))
    assert half["--compression powersgd:2"] - whole["--compression powersgd:2"] > 3e-9 * B4.gradient_bytes


def test_the_base_has_as_many_ranks_on_a_host():
    measured = told(1, 10, 1) + told(2, 14, 2)
    slow = replace(SLOW, gpus_per_host=1)
    assert predict(B4, slow, measured, 2).compute_s == pytest.approx(6.4)


def test_ways_are_named_where_ranks_wait_and_nowhere_else():
    ways = helps(B4, SLOW, predict(B4, SLOW, told(2, 200, 2), 8))
    assert "--compression powersgd:2" in ways
    assert [*ways.values()] == sorted(ways.values(), reverse=True)
    assert min(ways.values()) > 1
    assert helps(B4, A100, predict(B4, A100, told(8, 1223), 64)) == {}


def test_what_begins_after_backward_is_exposed_as_a_whole():
    step = predict(B4, SLOW, told(2, 20, 2), 4)
    ways, options, rest_s = ways_s(B4, SLOW, step), costs(SLOW, 4), step.step_s - step.exposed_s
    two_level = next(cost for cost in options if cost.algorithm == "two-level")
    assert ways["--sync two-level"] == pytest.approx(rest_s + two_level.seconds(B4.gradient_bytes))
    rounds_s = cheapest(options, B4.gradient_bytes).seconds(2 * B4.gradient_bytes) / 16
    assert ways["--sync local:16"] == pytest.approx(rest_s + rounds_s)


def test_odds_of_one_per_cent_on_128_nodes():
    per_hour = -math.log1p(-0.01)  # 1 % in an hour
    assert failures.odds(1.0, 128, per_hour) == pytest.approx(0.724, abs=5e-4)


def test_daly_is_below_the_time_between_failures_for_long_saves():
    assert failures.daly_s(100.0, 40.0) == 40.0
    assert failures.goodput_restarts(1e6, save_s=1.0, restart_s=1.0, between_s=10.0) == 0
    daly_s = math.sqrt(2 * 20 * 3600) * (1 + math.sqrt(20 / 7200) / 3 + 20 / 7200 / 9) - 20
    assert failures.daly_s(20.0, 3600.0) == pytest.approx(daly_s)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_dalys_interval_loses_least(factor):
    costs_s = {"save_s": 20.0, "restart_s": 60.0, "between_s": 3600.0}
    best_s = failures.daly_s(20.0, 3600.0)
    best = failures.goodput_restarts(best_s, **costs_s)
    assert best > failures.goodput_restarts(factor * best_s, **costs_s)
    assert best == pytest.approx(1 - 20 / best_s - (best_s / 2 + 60) / 3600, abs=0.02)  # the first-order form


def test_ranks_of_more_hosts_agree_by_more_messages():
    agreed_s = [predict(B4, A100, told(8, 1000), gpus).negotiation_s for gpus in (8, 32, 128)]
    assert agreed_s == pytest.approx([0.5e-3, 0.5e-3 + 4 * 15e-6, 0.5e-3 + 8 * 15e-6])


def test_links_and_times_of_sums():
    assert [parse_link(text) for text in ("200gbit", "8x200gbit", "100Mbit")] == pytest.approx([25, 200, 0.0125])
    assert parse_times("1G=2760us,1M=0.186ms") == ((2**20, pytest.approx(186e-6)), (2**30, pytest.approx(2760e-6)))


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_link, text) for text in ("0gbit", "0x200gbit", "25", "1gbit/s")),
        *((parse_times, text) for text in ("1M=186us", "1M=186,1G=2", "1M=0us,1G=1s", "1M=1us,1M=2us")),
    ],
)
def test_other_texts_are_refused(parse, text):
    with pytest.raises(ValueError, match=r"is not a link|allreduce|two"):
        parse(text)
