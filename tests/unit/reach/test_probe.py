import os

import pytest

from launch.machine.mpi import Mpi
from launch.reach import probe
from tests.unit.machines import machine


@pytest.mark.parametrize(
    ("connection", "address"),
    [
        ("10.0.0.9 40000 10.0.0.2 22", "10.0.0.2"),
        ("fd00::9 40000 fd00::2 22", None),  # the networks of a run are IPv4
        ("", None),
        ("odd", None),
    ],
)
def test_a_host_says_where_ssh_reached_it(monkeypatch, connection, address):
    monkeypatch.setenv("SSH_CONNECTION", connection)
    facts = probe.local_facts(None, gpus=False, visible=None)
    assert facts.address == address
    assert facts.topology.gpus == ()
    assert sum(len(node.cores) for node in facts.topology.numa_nodes) <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("mpi", [None, Mpi(path="/bin/mpirun", name="Open MPI", version=(4, 1, 8))])
def test_facts_travel_as_one_line(mpi):
    facts = probe.HostFacts(host="localhost", hostname="node1", topology=machine(), mpi=mpi, address="10.0.0.2")
    line = probe.facts_to_json(facts)
    assert "\n" not in line
    assert probe.facts_from_json(line, "localhost") == facts
    assert probe.facts_from_json(line, "h1").host == "h1"
