from dataclasses import replace

import pytest

from launch.errors import ProcessError
from launch.process import Answer
from launch.reach import probe
from launch.reach.probe import Mpi, parse_mpi, restrict, why_not
from tests.unit.machines import machine

OUTSIDE = "outside your CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        ("0", [0]),
        ("3,1", [1, 3]),
        (" 2 , 0 ", [0, 2]),
        ("GPU-1111", [1]),
        ("GPU-2", [2]),  # a beginning that only one has, as CUDA takes it
        ("GPU-3333,0", [0, 3]),
        ("1,1", [1]),
    ],
)
def test_gpus_outside_the_users_list_are_not_to_be_used(visible, left):
    topology = machine()
    found = restrict(topology, visible)
    assert [gpu.index for gpu in found.gpus if gpu.unusable is None] == left
    assert {gpu.unusable for gpu in found.gpus} == {None, OUTSIDE}
    assert (found.links, found.numa_nodes) == (topology.links, topology.numa_nodes)


def test_what_a_gpu_lacks_already_is_still_told():
    found = restrict(machine(unusable={0: "busy: pid 7", 1: "in MIG mode"}), "1,2")
    assert [gpu.unusable for gpu in found.gpus] == ["busy: pid 7", "in MIG mode", None, OUTSIDE]


def test_without_a_list_all_gpus_stay():
    assert restrict(machine(), None) == machine()
    assert restrict(machine(0), "7,x") == machine(0)  # nothing to choose from


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles"])
def test_an_empty_list_leaves_no_gpu(visible):
    assert restrict(machine(), visible) == replace(machine(), gpus=(), links=(), nics=())


@pytest.mark.parametrize(
    "visible", ["4", "0,9", "GPU-9", "GPU-", "x", "0,", "-2", "MIG-1111", "00", "0;rm", "0\n1", "1.0"]
)
def test_a_list_that_names_no_gpu_is_refused(visible):
    with pytest.raises(
        ProcessError, match=r"^CUDA_VISIBLE_DEVICES names '.*', which is no GPU of this host: give"
    ) as refused:
        restrict(machine(), visible)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI", (4, 1, 8)),
        ("mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n", "Open MPI", (5, 0, 3)),
        ("mpirun (Open MPI) 5.1.0a1\n", "Open MPI", (5, 1, 0)),
        (
            "HYDRA build details:\n    Version:                                 4.2.1\n    CC: gcc 12.2\n",
            "MPICH",
            (4, 2, 1),
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\nCopyright\n", "Intel MPI", (2021, 9)),
    ],
)
def test_an_mpi_says_what_it_is(text, name, version):
    assert parse_mpi("/bin/mpirun", text) == Mpi(path="/bin/mpirun", name=name, version=version)


@pytest.mark.parametrize("text", ["", "mpirun: command not found", "Version: 7", "mpirun (Open MPI)", "Open MPI 4"])
def test_what_is_no_mpi_is_none(text):
    assert parse_mpi("/bin/mpirun", text) is None


def test_an_mpi_in_words():
    assert str(Mpi(path="x", name="Open MPI", version=(4, 1, 8))) == "Open MPI 4.1.8"


# The texts of OpenSSH 9.2 and of bash.
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for h2 has changed and you have requested strict checking.
Host key verification failed.
"""
UNKNOWN = "No ED25519 host key is known for h2 and you have requested strict checking.\nHost key verification failed.\n"


@pytest.mark.parametrize(
    ("err", "line"),
    [
        ("ssh: connect to host h2 port 22: Connection refused\n", "ssh is refused: start sshd there"),
        ("ssh: Could not resolve hostname h2: Name or service not known\n", "unknown host name: correct -H"),
        (CHANGED, "its host key is not the one in known_hosts: if the host was really replaced, `ssh-keygen -R h2`"),
        (UNKNOWN, "its host key is unknown: connect to it once by hand, `ssh h2`"),
        (
            "root@h2: Permission denied (password).\n",
            "ssh asks for a password: copy a key there, with `ssh-copy-id h2`",
        ),
        (
            "Connection timed out during banner exchange\nConnection to 10.0.0.2 port 22 timed out\n",
            "ssh gets no answer",
        ),
        ("ssh: connect to host h2 port 22: Connection timed out\n", "ssh gets no answer"),
        ("Timeout, server h2 not responding.\n", "ssh gets no answer"),
        ("ssh: connect to host h2 port 22: No route to host\n", "no route to it"),
        ("ssh: connect to host h2 port 22: Network is unreachable\n", "its network cannot be reached"),
        ("/venv/python: No module named launch\n", "/venv/python there has no hvdlaunch"),
        (
            "/venv/python: Error while finding module specification (ModuleNotFoundError: No module named 'launch')\n",
            "/venv/python there has no hvdlaunch",
        ),
        ("bash: line 1: cd: /my runs: No such file or directory\n", "it has no folder /my runs"),
        ("sh: 1: cd: can't cd to /my runs\n", "it has no folder /my runs"),
        ("bash: line 1: /venv/python: No such file or directory\n", "it has no /venv/python"),
        ("sh: 1: exec: /venv/python: not found\n", "it has no /venv/python"),
        ("banner\nhvdlaunch: nvidia-smi gave no answer in 10 s\n", "nvidia-smi gave no answer in 10 s"),
        (
            "hvdlaunch: nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found\n",
            "nvidia-smi topo -m failed with status 4 and said: Permission denied, lib not found",
        ),
        ("kex_exchange_identification: read: hm\nlast {words}\n", "asked over ssh, it said: last {words}"),
        ("", "asked over ssh, it said: ended with status 255 without a word"),
    ],
)
def test_each_trouble_of_ssh_has_its_line_and_remedy(err, line):
    said = why_not(Answer(status=255, out="", err=err), host="h2", python="/venv/python", folder="/my runs")
    assert said.startswith(line)
    assert "\n" not in said
    assert "{" not in said.replace("{words}", "")


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
    facts = probe.here(None, gpus=False, visible=None)
    assert facts.address == address
    assert facts.topology.gpus == ()
    assert sum(len(node.cores) for node in facts.topology.numa_nodes) <= len(probe.os.sched_getaffinity(0))


def test_hosts_with_another_mpi_are_refused_by_name(monkeypatch):
    four, five = (Mpi(path="/bin/mpirun", name="Open MPI", version=(v, 0)) for v in (4, 5))
    facts = probe.HostFacts(host="localhost", hostname="here", topology=machine(0), mpi=four)
    there = {"h1": four, "h2": five, "h3": None}
    monkeypatch.setattr(probe, "here", lambda _, **__: facts)
    monkeypatch.setattr(probe, "is_local", lambda host: host == "me")
    monkeypatch.setattr(
        probe,
        "_ask_host",
        lambda host, *_: probe.HostFacts(host=host, hostname=host, topology=machine(), mpi=there[host]),
    )

    def asked(*hosts):
        return probe.ask_hosts(hosts, mpirun=four, python="python", folder="/", gpus=True)

    assert {host: one.host for host, one in asked("h1", "me").items()} == {"h1": "h1", "me": "me"}
    with pytest.raises(
        probe.HostError, match=r"^host h2: /bin/mpirun is Open MPI 5.0, here it is Open MPI 4.0: install"
    ):
        asked("h1", "h2")
    with pytest.raises(probe.HostError, match=r"^host h3: /bin/mpirun is missing, here it is Open MPI 4.0: install"):
        asked("h3", "h2")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5"])
def test_names_and_addresses_of_this_machine_are_local(host):
    assert probe.is_local(host)


def test_an_address_of_the_documentation_is_not_local():
    assert not probe.is_local("192.0.2.1")
