import pytest

from launch.advice.study.links import Bandwidth, LinkSpeed, bandwidth_table, slow_endpoints, slow_ones
from launch.machine.topology import Link
from tests.unit.machines import linked

SIZES = (2**10, 2**20, 2**24)


def speeds(gb_per_s, sizes=SIZES):
    return tuple(LinkSpeed(bytes=size, median_s=size / gb_per_s / 1e9, gb_per_s=gb_per_s) for size in sizes)


def found(**what):
    return Bandwidth(**{"topologies": {}, **what})


def pairs_of(rates):
    """Every two hosts at the rate of the slower one."""
    names = sorted(rates)
    return {(a, b): speeds(min(rates[a], rates[b])) for i, a in enumerate(names) for b in names[i + 1 :]}


def links_of(slow, *, size=4, usual=20.0):
    return {(a, b): speeds(slow.get((a, b), usual)) for a in range(size) for b in range(a + 1, size)}


def test_a_host_with_a_slow_network_is_named_and_its_pairs_are_not():
    (slow,) = slow_ones(found(pairs=pairs_of({"h1": 0.1, "h2": 0.025, "h3": 0.1})))
    assert slow.hosts == ("h2",)
    assert slow.problem == "with every other host it exchanges 16MB at 0.025 GB/s or less, others reach 0.1"
    assert "ethtool" in slow.remedy


@pytest.mark.parametrize(("sizes", "size"), [(SIZES, "16MB"), (SIZES[:2], "1MB")], ids=["all", "one has no 16MB"])
def test_a_slow_pair_is_named_at_a_size_that_all_have(sizes, size):
    pairs = pairs_of(dict.fromkeys(("h1", "h2", "h3", "h4"), 1.0)) | {("h2", "h3"): speeds(0.3, sizes)}
    (slow,) = slow_ones(found(pairs=pairs))
    assert (slow.hosts, slow.problem) == (("h2",), f"with h3 it exchanges {size} at 0.3 GB/s, others reach 1")


def test_alike_ones_and_a_single_pair_are_not_slow():
    pairs = pairs_of({"h1": 1.0, "h2": 0.7, "h3": 1.0})
    assert slow_ones(found(pairs=pairs, hosts={"h1": speeds(2.0), "h2": speeds(1.5)})) == []
    assert slow_ones(found(pairs={("h1", "h2"): speeds(0.001)})) == []


def test_a_slow_host_by_itself():
    hosts = {"h1": speeds(10.0), "h2": speeds(10.0), "h3": speeds(4.0)}
    (slow,) = slow_ones(found(hosts=hosts))
    assert (slow.hosts, slow.problem) == (("h3",), "its own ranks sum 16MB at 4 GB/s, the median of all hosts is 10")


def test_one_slow_pair_does_not_blame_its_hosts():
    assert slow_endpoints({("a", "b")}, [("a", "b")]) == ([], [("a", "b")])
    assert slow_endpoints({("a", "c"), ("b", "c")}, [("a", "b"), ("a", "c"), ("b", "c")]) == (["c"], [])


def test_a_slow_link_and_a_slow_gpu_are_named():
    topologies = {"h1": linked(4, "PIX"), "h2": linked(4, "PIX")}
    (slow,) = slow_ones(found(links={"h1": links_of({(1, 2): 8.0}), "h2": links_of({})}, topologies=topologies))
    assert slow.hosts == ("h1",)
    assert all(fact in slow.problem for fact in ("GPUs 1 and 2", "16MB", "8 GB/s", "PIX", "20"))
    third = {(0, 3): 5.0, (1, 3): 5.0, (2, 3): 6.0}
    (slow,) = slow_ones(found(links={"h1": links_of(third), "h2": links_of({})}, topologies=topologies))
    assert slow.hosts == ("h1",)
    assert all(fact in slow.problem for fact in ("every link of GPU 3", "6 GB/s", "16MB"))


def test_links_of_other_kinds_are_not_compared():
    near = linked(3, odd={(0, 1): Link(kind="PIX")})
    own = links_of({(0, 2): 5.0, (1, 2): 5.0}, size=3)
    assert slow_ones(found(links={"h1": own}, topologies={"h1": near})) == []


def test_the_table():
    measured = {"hosts": {"h1": speeds(18.0)}, "pairs": {("h1", "h2"): speeds(1.25)}}
    measured |= {"links": {"h1": links_of({}, size=2)}, "over_all": speeds(1.0, SIZES[:2])}
    both = found(topologies={"h1": linked(2, "PIX"), "h2": linked(2, "PIX")}, **measured)
    assert bandwidth_table(both).splitlines() == [
        "GB/s       latency   64KB  1MB   4MB  16MB  64MB  256MB",
        "on h1      0.000 ms  -     18    -    18    -     -",
        "h1 and h2  0.001 ms  -     1.25  -    1.25  -     -",
        "over all   0.001 ms  -     1     -    -     -     -",
        "",
        "h1    GPU0  GPU1",
        "GPU0  -     20.0",
        "GPU1  20.0  -",
    ]
