import json
from dataclasses import replace

import pytest

from launch.errors import SelectionError, TopologyError
from launch.machine.topology import Gpu, Topology
from launch.placement.measured import GpuLinks, read, with_measured
from launch.placement.selection import select
from tests.unit.machines import linked, refusal_of


def links(speeds, *, host="h1", size=4, uuids=True, rest=10.0):
    """Between so many GPUs `rest` GB/s, but for these pairs."""

    def speed(a, b):
        return None if a == b else speeds.get((min(a, b), max(a, b)), rest)

    return GpuLinks(
        host=host,
        gpus=tuple(range(size)),
        uuids=tuple(f"GPU-{i}" if uuids else None for i in range(size)),
        gb_per_s=tuple(tuple(speed(a, b) for b in range(size)) for a in range(size)),
    )


def written(*hosts):
    plain = [{"host": one.host, "gpus": one.gpus, "uuids": one.uuids, "gb_per_s": one.gb_per_s} for one in hosts]
    return json.dumps({"findings": [], "bandwidth": {"gpu_links": plain}})


def test_what_check_has_written_is_read():
    mine = links({(0, 1): 23.5})
    assert read(written(mine), name="f.json").links == (mine,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f.json: it is not from hvdlaunch check --bandwidth --json: measure them"),
        ('{"bandwidth": {}}', "f.json: it is not from hvdlaunch check"),
        ('{"bandwidth": {"gpu_links": []}}', "f.json: no host in it has two GPUs that were measured"),
        (written(replace(links({}), gpus=(0, 1, 2))), "gpu_links[0]: expected each GPU once"),
        (written(links({(0, 1): float("nan")})), "f.json: it is not from hvdlaunch check"),
        (written(links({(0, 1): "fast"})), "expected float or null, found 'fast'"),
    ],
)
def test_other_texts_are_refused(text, problem):
    assert problem in refusal_of(TopologyError, lambda: read(text, name="f.json"))


def test_measured_speeds_decide_in_place_of_kinds():
    """By kind all are alike and PCI order decides; 1 and 3 were measured faster."""
    plain = linked(4)
    assert select(plain, 2).best.gpus == (0, 1)
    found = select(with_measured(plain, [links({(1, 3): 20.0})]), 2)
    assert (found.best.gpus, found.best.bandwidth_gbps) == ((1, 3), 20.0)
    assert found.best.reason.startswith("slowest link of the ring SYS (20 GB/s measured); leaves 0,2.")


def test_the_slowest_link_decides_before_the_sum():
    found = select(with_measured(linked(4), [links({(0, 1): 20.0, (1, 2): 20.0, (0, 2): 1.0})]), 3)
    assert (found.best.gpus, found.best.bandwidth_gbps) == ((0, 1, 3), 10.0)
    assert found.best.reason.endswith("Before 1,2,3 by PCI order.")


def test_differences_by_chance_decide_nothing():
    found = select(with_measured(linked(4), [links({(1, 3): 10.4, (0, 1): 9.9})]), 2)
    assert found.best.gpus == (0, 1)
    assert found.best.reason.endswith("by PCI order.")


def test_where_there_is_nothing_to_choose_nothing_need_be_measured():
    lost = replace(linked(2), gpus=(Gpu(index=0, unusable="unhealthy: lost"), Gpu(index=1)))
    for plain in (Topology(source="none"), linked(1), lost):
        assert with_measured(plain, [links({})], "h9") == plain


def test_gpus_that_were_not_measured_are_not_chosen():
    found = with_measured(linked(6), [links({}, size=4)])
    assert [gpu.unusable for gpu in found.gpus[4:]] == ["not measured"] * 2
    with pytest.raises(SelectionError, match="4 are free"):
        select(found, 5)


@pytest.mark.parametrize(
    ("measured", "host", "problem"),
    [
        ([links({}, host="h2")], "h1", None),  # by UUID
        ([links({}, host="h2"), links({}, host="h1", uuids=False)], "h2", None),
        ([links({}, host="h2", uuids=False)], "h1", "--measured: host h1 has other GPUs than what was measured, h2: "),
        ([links({}, uuids=False), links({}, host="h2", uuids=False)], None, "a test may be any of these: h1, h2"),
    ],
)
def test_the_right_host_is_found(measured, host, problem):
    if problem is None:
        assert with_measured(linked(4), measured, host).measured
    else:
        assert problem in refusal_of(TopologyError, lambda: with_measured(linked(4), measured, host))
