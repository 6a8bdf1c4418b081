import dataclasses
import json
import os

import pytest

from launch.errors import HostError
from launch.hosts import host_facts
from launch.machine.condition import Inspection, Setting
from launch.machine.mpi import Mpi
from tests.unit.machines import condition, machine, refusal_of

FACTS = host_facts.HostFacts(
    host="h7",
    hostname="node7",
    topology=machine(1, nics=(("mlx5_0", "PIX SYS SYS SYS"),), interfaces=(("eth0", "10.0.0.2/24"),), cores=(0, 8)),
    mpi=Mpi(path="/bin/mpirun", name="Open MPI", version=(4, 1, 8)),
    address="10.0.0.2",
    condition=condition(settings=(Setting(name="NCCL_DEBUG", value="INFO", source="its environment"),)),
)
REPORT = json.loads(host_facts.facts_to_json(FACTS))
OURS = host_facts.version()


@pytest.mark.parametrize(
    ("variable", "value", "address"),
    [
        ("SSH_CONNECTION", "10.0.0.9 40000 10.0.0.2 22", "10.0.0.2"),
        ("SSH_CONNECTION", "fd00::9 40000 fd00::2 22", None),  # the networks of a run are IPv4
        ("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1", "127.0.0.1"),
        ("SLURM_LAUNCH_NODE_IPADDR", "fd00::9", None),
        *((name, "odd", None) for name in ("SSH_CONNECTION", "SLURM_LAUNCH_NODE_IPADDR")),
    ],
)
def test_a_host_says_where_ssh_or_srun_reached_it(monkeypatch, variable, value, address):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv(variable, value)
    facts = host_facts.local_facts(None, gpus=False)
    assert facts.address == address
    assert facts.topology.gpus == ()
    assert sum(len(node.cores) for node in facts.topology.numa_nodes) <= len(os.sched_getaffinity(0))


@pytest.fixture
def ask(monkeypatch, capsys):
    """What a host without an MPI answers to these words."""
    monkeypatch.setattr(host_facts, "read_mpi", lambda _: None)

    def answer(*words):
        host_facts.main("/bin/mpirun", *words)
        return host_facts.facts_from_json(capsys.readouterr().out.removeprefix(host_facts.MARK), "h1", OURS)

    return answer


@pytest.mark.parametrize(("visible", "free"), [(None, [0, 1, 2, 3]), ("1,3", [1, 3])])
def test_each_host_goes_by_its_own_cuda_visible_devices(monkeypatch, ask, visible, free):
    monkeypatch.setattr(host_facts, "local_topology", lambda **_: machine())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in ask("gpus").topology.gpus if gpu.unusable is None] == free


def test_facts_travel_as_one_line():
    for facts in (FACTS, dataclasses.replace(FACTS, mpi=None, condition=None, port=20_000)):
        line = host_facts.facts_to_json(facts)
        assert "\n" not in line
        assert host_facts.facts_from_json(line, "h7", OURS) == facts
        assert host_facts.facts_from_json(line, "h1", OURS).host == "h1"


def test_a_host_that_is_asked_to_look_tells_its_condition(ask, tmp_path):
    (tmp_path / "token").touch()
    (tmp_path / "prog").touch()
    facts = ask("none", str(tmp_path / "token"), str(tmp_path / "prog"), str(tmp_path), str(tmp_path / "data"))
    assert facts.condition.sees_token is True
    assert facts.condition.missing_program == str(tmp_path / "prog")  # it may not be executed
    assert [folder.there for folder in facts.condition.folders] == [True, False]
    inspection = Inspection(folders=("/a",), token=None)
    with pytest.raises(HostError, match=r"its report\.condition: expected one with 1 folders, found 2"):
        host_facts.facts_from_json(host_facts.facts_to_json(facts), "h1", OURS, inspection=inspection)
    assert ask("none", "", str(tmp_path)).condition.sees_token is None
    assert ask("none").condition is None


def refusal(text):
    line = refusal_of(HostError, lambda: host_facts.facts_from_json(text, "h7", OURS))
    assert line.startswith("host h7: ")
    return line


@pytest.mark.parametrize("text", ["", "5", '"\x1b[31m"', "[" * 100_000, '{"a": NaN'])
def test_what_is_no_report_is_refused_with_its_host_and_what_to_look_at(text):
    line = refusal(text)
    assert "its report" in line
    assert line.endswith(": see what `python -m launch.hosts.host_facts mpirun gpus` prints there")


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"version": "0123456789ab"}, "version '0123456789ab'"),  # its ranks would read the plan otherwise
        ({"version": "\x1b[31m", "new": 1}, r"version '\x1b[31m'"),
        ({"version": None}, "an older version"),
    ],
)
def test_a_report_of_another_version_is_refused_with_both_versions(changes, there):
    expected = f"host h7: it has {there} of the project, here it is {OURS!r}: install the same version there"
    assert refusal(json.dumps({**REPORT, **changes})) == expected
    older = {name: value for name, value in REPORT.items() if name != "version"}
    assert "it has an older version of the project" in refusal(json.dumps(older))


def test_a_report_of_another_version_is_taken_where_that_may_be_and_says_so():
    other = json.dumps({**REPORT, "version": "0123456789ab"})
    facts = host_facts.facts_from_json(other, "h7", OURS, any_version=True)
    assert facts == dataclasses.replace(FACTS, other_version="0123456789ab")
    with pytest.raises(HostError, match="it has version '0123456789ab' of the project"):
        host_facts.facts_from_json(json.dumps({"version": "0123456789ab", "new": 1}), "h7", OURS, any_version=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"address": "10.0.0.256"}, "its report.address: expected one as 10.0.0.3, found '10.0.0.256'"),
        ({"port": 65_536}, "its report.port: expected one from 1 to 65535, found"),
        ({"hostname": ""}, "its report.hostname: expected a name, found none"),
        ({"topology": {**REPORT["topology"], "gpus": []}}, "its report.topology.links: expected 0 rows"),
    ],
)
def test_a_part_that_makes_no_sense_is_named(changes, says):
    assert says in refusal(json.dumps({**REPORT, **changes}))
