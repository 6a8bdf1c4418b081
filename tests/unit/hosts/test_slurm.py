import pytest

from launch.hosts.slurm import from_slurm, gpus_of_one_task
from tests.unit.hosts.lists import hosts, refusal


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node[01-03,07]", "node01 node02 node03 node07"),
        ("r[1-2]n[1-3]", "r1n1 r1n2 r1n3 r2n1 r2n2 r2n3"),
        ("a,b[1-2]-ib", "a b1-ib b2-ib"),
        ("n[0-2],n[008-010]", "n0 n1 n2 n008 n009 n010"),
        ("n[00,1]", "n00 n1"),
        ("b,a[2,1]", "b a2 a1"),
        ("n[1-2].lab.example,m", "n1.lab.example n2.lab.example m"),
    ],
)
def test_slurm_node_lists(nodes, names):
    assert from_slurm(nodes) == hosts(*((name, 1) for name in names.split()))
    assert from_slurm(nodes, slots=8) == hosts(*((name, 8) for name in names.split()))


def test_slurm_slots_come_from_one_place():
    assert from_slurm("a[1-2]:8,b:4,c") == hosts(("a1", 8), ("a2", 8), ("b", 4), ("c", 1))
    assert from_slurm("a[1-4]", "2(x3),1") == hosts(("a1", 2), ("a2", 2), ("a3", 2), ("a4", 1))
    assert from_slurm("a", "16") == hosts(("a", 16))
    assert from_slurm("a,b,a", "1,2,3") == hosts(("a", 4), ("b", 2))
    assert "'b:4' has its slots twice" in refusal(from_slurm, "a,b:4", "2,2")
    assert "'b:4' has its slots twice" in refusal(from_slurm, "a,b:4", slots=2)


@pytest.mark.parametrize("tasks", ["2(x2)", "2,2,2,2", "1(x3),1(x999999999)", "2(x0)"])
def test_slurm_tasks_must_fit_the_hosts(tasks):
    assert "does not fit 3 hosts" in refusal(from_slurm, "a[1-3]", tasks)


@pytest.mark.parametrize("tasks", ["", "2(x3", "2(x3)1", "2;2"])
def test_refuses_slurm_tasks_that_it_does_not_know(tasks):
    assert refusal(from_slurm, "a[1-3]", tasks).startswith("SLURM_TASKS_PER_NODE: ")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("n[3-1]", "'3-1' is not a range"),
        ("n[08-110]", "'08-110' is not a range"),
        ("n[1-2-3]", "'1-2-3' is not a range"),
        ("n[1,]", "'' is not a range"),
        ("n[\u0661-\u0662]", "is not a range"),
        ("n[1-2", "is not understood"),
        ("n[[1-2]]", "is not understood"),
        ("a,,b", "is not understood"),
        ("", "is not understood"),
        ("n[1-2]:", "'' is not a number of slots"),
        ("(null)", "'(null)' is not a host name"),
        ("n[0-999999999]", "'n[0-999999999]' makes more than 65536 hosts"),
        ("n" + "[0-99]" * 3, "more than 65536"),
        ("[" * 100_000, "is not understood"),
        ("a," * 100_000, "is not understood"),
    ],
)
def test_refuses_slurm_node_lists(nodes, words):
    assert words in refusal(from_slurm, nodes)


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "a100:4,v100:2"}, 6),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "1"}, None),  # each task its own GPU
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "many"}, None),
        ({"SLURM_GPUS_ON_NODE": "8"}, None),
    ],
)
def test_one_task_for_all_gpus_of_a_node_means_a_slot_for_each(environment, gpus):
    assert gpus_of_one_task(environment) == gpus
