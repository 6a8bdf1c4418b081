import pytest

from launch.errors import HostError
from launch.hosts import probe as probed
from launch.hosts.host_facts import HostFacts, facts_to_json
from launch.machine.condition import Inspection
from launch.machine.local import DRIVER_TIMEOUT_S
from launch.machine.mpi import Mpi
from tests.unit.machines import machine

FOUR, FIVE = (Mpi(path="/bin/mpirun", name="Open MPI", version=(v, 0)) for v in (4, 5))


class Reached:
    """Hosts that answer over no ssh: each with its MPI, or with an error."""

    def __init__(self, **there):
        self.there, self.asked = there, []

    def ask(self, host, words, folder, *, mark, timeout_s):
        self.asked.append((words, timeout_s))
        if isinstance(self.there[host], Exception):
            raise self.there[host]
        return facts_to_json(HostFacts(host=host, hostname=host, topology=machine(), mpi=self.there[host]))

    def reaches(self, host):
        return self.there[host] is not None


@pytest.fixture(autouse=True)
def here(monkeypatch):
    facts = HostFacts(host="localhost", hostname="here", topology=machine(0), mpi=FOUR)
    monkeypatch.setattr(probed, "local_facts", lambda _, **__: facts)
    monkeypatch.setattr(probed, "is_local", lambda host: host == "me")


def probe(ssh, *hosts, **options):
    usual = {"ssh": ssh, "mpirun": FOUR, "python": "python", "folder": "/", "gpus": True}
    return probed.probe_hosts(hosts, **usual, **options)


def ask_for(ssh, *hosts):
    return probed.all_usable(probe(ssh, *hosts))


def test_a_host_without_mpi_is_refused_by_name():
    ssh = Reached(h1=FOUR, h3=None)
    assert {host: facts.host for host, facts in ask_for(ssh, "h1", "me").items()} == {"h1": "h1", "me": "me"}
    with pytest.raises(HostError, match=r"^host h3: /bin/mpirun is missing, here it is Open MPI 4.0: install"):
        ask_for(ssh, "h3", "me")


def test_all_hosts_that_cannot_be_used_are_named_at_once_with_each_reason_once():
    lines = {name: f"host {name}: ssh asks for a password: `ssh-copy-id {name}`" for name in ("h1", "h4")}
    prompts = {name: HostError(line, [f"root@{name}: denied"]) for name, line in lines.items()}
    with pytest.raises(HostError) as refused:
        ask_for(Reached(**prompts, h2=FOUR, h3=FIVE), "h1", "h2", "h3", "h4")
    assert str(refused.value) == "3 of 4 hosts cannot be used: h1, h3, h4: fix them, or leave them out"
    assert refused.value.details == (
        "host h1: ssh asks for a password: `ssh-copy-id h1`; the same on h4",
        "    root@h1: denied",
        "host h3: /bin/mpirun is Open MPI 5.0, here it is Open MPI 4.0: install the same MPI at the same path",
    )


def test_a_host_may_take_as_long_as_its_driver_and_some_seconds(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # here alone
    ssh = Reached(h1=FOUR)
    assert len(ask_for(ssh, "h1")["h1"].topology.gpus) == 4
    ((words, timeout_s),) = ssh.asked
    assert words == ["python", "-P", "-m", "launch.hosts.host_facts", "/bin/mpirun", "gpus"]
    assert DRIVER_TIMEOUT_S < timeout_s < DRIVER_TIMEOUT_S + 10


def test_a_look_is_asked_in_the_same_connection_and_must_be_answered():
    ssh = Reached(h1=FOUR)
    inspection = Inspection(folders=("/shared/my runs", "/data"), token=None, program="/env/bin/prog")
    refused = probe(ssh, "h1", inspection=inspection, any_version=True)["h1"]
    assert "its report.condition: expected one with 2 folders, found 0" in str(refused)
    ((words, _),) = ssh.asked
    assert words[-5:] == ["gpus", "", "/env/bin/prog", "/shared/my runs", "/data"]


def test_another_mpi_may_be_one_of_the_facts():
    found = probe(Reached(h1=FIVE, h2=None), "h1", "h2", any_version=True)
    assert [found[host].mpi for host in ("h1", "h2")] == [FIVE, None]


def test_names_and_addresses_of_this_machine_are_local(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(probed.socket, "gethostname", lambda: "Node1")  # which no name server knows
    assert all(map(probed.is_local, ["localhost", "LocalHost", "NODE1", "127.0.0.5", "127.1", "0.0.0.0"]))  # noqa: S104
    assert not probed.is_local("192.0.2.1")  # an address of the documentation


def test_the_first_host_that_does_not_answer_is_silent():
    ssh = Reached(h1=FOUR, h2=None, h3=None)
    assert probed.silent_host(["me", "h1", "h3", "h2", "h3"], ssh) == "h3"
    assert probed.silent_host(["me", "h1"], ssh) is None
    assert probed.silent_host([], ssh) is None
