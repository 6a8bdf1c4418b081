import pytest

from launch.hosts.slurm import from_slurm, read_allocation
from tests.unit.hosts.lists import refusal
from tests.unit.machines import hosts


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
    assert from_slurm(nodes) == hosts(**dict.fromkeys(names.split(), 1))


def test_slurm_nodes_may_carry_their_slots():
    assert from_slurm("a[1-2]:8,b:4,c") == hosts(a1=8, a2=8, b=4, c=1)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        *((f"n[{text}]", f"'{text}' is not a range") for text in ("3-1", "08-110", "1-2-3")),
        ("n[1,]", "'' is not a range"),
        ("n[\u0661-\u0662]", "is not a range"),
        *((text, "is not understood") for text in ("n[1-2", "n[[1-2]]", "a,,b", "", "[" * 100_000, "a," * 100_000)),
        ("n[1-2]:", "'' is not a number of slots"),
        ("(null)", "'(null)' is not a host name"),
        ("n[0-999999999]", "'n[0-999999999]' makes more than 65536 hosts"),
    ],
)
def test_refuses_slurm_node_lists(nodes, words):
    assert words in refusal(from_slurm, nodes)


def read(**variables):
    """The hosts with their slots, `?` for those that are not counted, and the GPUs of each."""
    found = read_allocation({f"SLURM_{name}": value for name, value in variables.items()})
    return " ".join(f"{host.name}:{host.slots if host.counted else '?'}" for host in found.hosts), found.gpus


JOB = {"JOB_NODELIST": "n[1-3]", "TASKS_PER_NODE": "2(x2),1"}


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({}, "n1:2 n2:2 n3:1"),
        ({"JOB_NODELIST": "", "NODELIST": "n[1-3]"}, "n1:2 n2:2 n3:1"),
        ({"TASKS_PER_NODE": ""}, "n1:? n2:? n3:?"),
        *(({"TASKS_PER_NODE": of_others}, "n1:? n2:? n3:?") for of_others in ("2(x2)", "2,2,2,2", "1,1(x999999999)")),
        # a step
        ({"STEP_NODELIST": "n2", "STEP_TASKS_PER_NODE": "4", "TASKS_PER_NODE": "4"}, "n2:4"),
        ({"STEP_NODELIST": "n[2-3]", "STEP_TASKS_PER_NODE": "2,1", "TASKS_PER_NODE": "2,1"}, "n2:2 n3:1"),
        ({"STEP_NODELIST": "n2", "STEP_TASKS_PER_NODE": "1", "TASKS_PER_NODE": "1", "NTASKS": "1"}, "n2:?"),
        ({"STEP_NODELIST": "n2", "TASKS_PER_NODE": ""}, "n2:?"),
        ({"STEP_NODELIST": "", "STEP_TASKS_PER_NODE": ""}, "n1:2 n2:2 n3:1"),
        # the shell of salloc
        ({"STEP_NODELIST": "n1", "STEP_TASKS_PER_NODE": "1"}, "n1:2 n2:2 n3:1"),
    ],
)
def test_tasks_count_for_the_nodes_of_their_own_job_or_step(variables, slots):
    assert read(**JOB | variables)[0] == slots


@pytest.mark.parametrize(
    ("variables", "slots", "gpus"),
    [
        ({"GPUS_ON_NODE": "4"}, "n1:? n2:?", None),  # this node's; the other may have 2
        ({"GPUS_ON_NODE": "4", "GPUS": "6"}, "n1:? n2:?", None),
        ({"GPUS_ON_NODE": "4", "GPUS": "8"}, "n1:4 n2:4", (4, 4)),
        ({"GPUS_ON_NODE": "8", "STEP_NODELIST": "n2", "TASKS_PER_NODE": "1"}, "n2:8", (8,)),
        ({"GPUS_ON_NODE": "1", "GPUS_PER_TASK": "1"}, "n1:1 n2:1", (1, 1)),
        ({"GPUS_PER_NODE": "a100:4,v100:2"}, "n1:6 n2:6", (6, 6)),
        ({"GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, "n1:4 n2:4", (4, 4)),
        ({"GPUS_PER_NODE": "8", "GPUS_ON_NODE": "2"}, "n1:? n2:?", None),  # a step's and a job's
        ({"NTASKS": "2"}, "n1:1 n2:1", None),
        ({"NTASKS": "2", "GPUS_PER_NODE": "8"}, "n1:8 n2:8", (8, 8)),
        ({"TASKS_PER_NODE": "2,1", "GPUS_PER_TASK": "2", "GPUS_ON_NODE": "4"}, "n1:2 n2:1", (4, 2)),
        ({"TASKS_PER_NODE": "8(x2)", "GPUS_ON_NODE": "8"}, "n1:8 n2:8", None),
    ],
)
def test_one_task_for_all_gpus_of_a_node_means_a_slot_for_each(variables, slots, gpus):
    assert read(**{"JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "1(x2)"} | variables) == (slots, gpus)


@pytest.mark.parametrize(
    ("variables", "unit"),
    [
        ({"TASKS_PER_NODE": "128(x2)"}, "slot"),  # salloc --exclusive
        ({"TASKS_PER_NODE": "40(x2)", "NTASKS": "80"}, "rank"),
        ({"TASKS_PER_NODE": "4(x2)", "STEP_NODELIST": "n[1-2]"}, "rank"),
        ({"TASKS_PER_NODE": "1(x2)", "GPUS_ON_NODE": "8"}, "node"),
    ],
)
def test_tasks_are_for_ranks_if_they_were_requested(variables, unit):
    given = {"JOB_NODELIST": "n[1-2]", **variables}
    found = read_allocation({f"SLURM_{name}": value for name, value in given.items()})
    assert {host.unit for host in found.hosts} == {unit}


@pytest.mark.parametrize("tasks", ["2(x3", "2(x3)1", "2;2", "0(x3)", "4097,1,1"])
def test_refuses_slurm_tasks_that_it_does_not_know(tasks):
    assert refusal(read, JOB_NODELIST="a[1-3]", TASKS_PER_NODE=tasks).startswith("SLURM_TASKS_PER_NODE: ")


def test_without_a_list_of_nodes_there_is_no_allocation():
    assert read_allocation({"SLURM_JOB_NODELIST": "", "SLURM_TASKS_PER_NODE": "1"}) is None
