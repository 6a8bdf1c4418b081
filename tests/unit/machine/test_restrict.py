"""CUDA_VISIBLE_DEVICES, and --gpus after a restart, on a topology."""

import re
from dataclasses import replace

import pytest

from launch.errors import ProcessError
from launch.machine.nvidia import MIG
from launch.machine.topology import named, restrict
from tests.unit.machines import machine, refusal_of

OUTSIDE = "outside your CUDA_VISIBLE_DEVICES"


LEFT = {"3,1": [1, 3], " 2 , 0 ": [0, 2], "GPU-2": [2], "GPU-3333,0": [0, 3]}  # of a UUID a beginning is enough


@pytest.mark.parametrize("visible", LEFT)
def test_gpus_outside_the_users_list_are_not_to_be_used(visible):
    topology = machine()
    found = restrict(topology, visible)
    assert [gpu.index for gpu in found.gpus if gpu.unusable is None] == LEFT[visible]
    assert {gpu.unusable for gpu in found.gpus} == {None, OUTSIDE}
    assert (found.links, found.numa_nodes) == (topology.links, topology.numa_nodes)


def test_a_gpu_outside_the_list_is_first_of_all_outside():
    found = restrict(machine(unusable={0: "busy: pid 7", 1: "in MIG mode"}), "1,2")
    assert [gpu.unusable for gpu in found.gpus] == [OUTSIDE, "in MIG mode", None, OUTSIDE]


def test_a_busy_gpu_that_is_named_is_shared_and_all_others_are_left_alone():
    given = machine(unusable={0: "busy: pid 7", 1: "in MIG mode", 2: "busy: pid 8"})
    found = named(given, (0, 1))
    assert [gpu.unusable for gpu in found.gpus] == [None, "in MIG mode", "busy: pid 8", "not named by --gpus"]
    assert [gpu.shared for gpu in found.gpus] == ["busy: pid 7", None, None, None]
    assert named(given, "all") == given


@pytest.mark.parametrize("held", ["busy: pid 7, another run of yours", "busy: another run of yours holds it"])
def test_a_gpu_that_another_run_holds_is_not_shared_by_being_named(held):
    given = machine(unusable={0: held})
    assert named(given, (0, 1, 2, 3)) == given


def test_a_slice_is_refused_in_a_line_that_says_what_works():
    line = refusal_of(ProcessError, lambda: restrict(machine(unusable={0: "in MIG mode"}), "MIG-1111"))
    assert line == f"CUDA_VISIBLE_DEVICES names 'MIG-1111', a slice of a GPU in MIG mode: {MIG}"


def test_without_a_list_all_gpus_stay_and_an_empty_one_leaves_none():
    assert restrict(machine(), None) == machine()
    assert restrict(machine(0), "7,x") == machine(0)  # nothing to choose from
    for visible in ("", "-1", "NoDevFiles"):
        assert restrict(machine(), visible) == replace(machine(), gpus=(), links=(), nics=())


@pytest.mark.parametrize("visible", ["4", "0,9", "GPU-9", "GPU-", "x", "0,", "00", "0\n1"])
def test_a_list_that_names_no_gpu_is_refused(visible):
    line = refusal_of(ProcessError, lambda: restrict(machine(), visible))
    assert re.match(r"CUDA_VISIBLE_DEVICES names '.*', which is not a GPU of this host: pass", line)
