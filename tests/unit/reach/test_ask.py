import threading

import pytest

from launch.errors import HostError
from launch.machine.mpi import Mpi
from launch.process import Answer
from launch.reach import ask
from launch.reach.probe import HostFacts, facts_to_json
from tests.unit.machines import machine


def test_hosts_with_another_mpi_are_refused_by_name(monkeypatch):
    four, five = (Mpi(path="/bin/mpirun", name="Open MPI", version=(v, 0)) for v in (4, 5))
    facts = HostFacts(host="localhost", hostname="here", topology=machine(0), mpi=four)
    there = {"h1": four, "h2": five, "h3": None}
    monkeypatch.setattr(ask, "local_facts", lambda _, **__: facts)
    monkeypatch.setattr(ask, "is_local", lambda host: host == "me")
    monkeypatch.setattr(
        ask,
        "_facts_over_ssh",
        lambda host, *_: HostFacts(host=host, hostname=host, topology=machine(), mpi=there[host]),
    )

    def ask_for(*hosts):
        return ask.ask_hosts(hosts, mpirun=four, python="python", folder="/", gpus=True)

    assert {host: facts.host for host, facts in ask_for("h1", "me").items()} == {"h1": "h1", "me": "me"}
    with pytest.raises(HostError, match=r"^host h2: /bin/mpirun is Open MPI 5.0, here it is Open MPI 4.0: install"):
        ask_for("h1", "h2")
    with pytest.raises(HostError, match=r"^host h3: /bin/mpirun is missing, here it is Open MPI 4.0: install"):
        ask_for("h3", "h2")


def test_other_hosts_are_not_bound_by_the_gpus_that_are_visible_here(monkeypatch):
    asked = {}
    mpi = Mpi(path="/bin/mpirun", name="Open MPI", version=(4, 0))
    facts = HostFacts(host="localhost", hostname="here", topology=machine(), mpi=mpi)

    def over_ssh(host, words, *_, **__):
        asked[host] = words
        return facts_to_json(facts)

    monkeypatch.setattr(ask, "is_local", lambda _: False)
    monkeypatch.setattr(ask, "ask_over_ssh", over_ssh)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    there = ask.ask_hosts(["h1", "h2"], mpirun=mpi, python="python", folder="/", gpus=True)
    assert {host: len(answer.topology.gpus) for host, answer in there.items()} == {"h1": 4, "h2": 4}
    assert {words[-1] for words in asked.values()} == {"gpus"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5"])
def test_names_and_addresses_of_this_machine_are_local(host):
    assert ask.is_local(host)


def test_an_address_of_the_documentation_is_not_local():
    assert not ask.is_local("192.0.2.1")


def test_the_first_host_that_does_not_answer_is_silent(monkeypatch):
    status = {"h1": 0, "h2": 255, "h3": 255}
    monkeypatch.setattr(ask, "is_local", lambda host: host == "me")
    monkeypatch.setattr(ask, "ask", lambda argv, **_: Answer(status=status[argv[-2]], out="", err=""))
    assert ask.silent_host(["me", "h1", "h3", "h2", "h3"]) == "h3"
    assert ask.silent_host(["me", "h1"]) is None
    assert ask.silent_host([]) is None


def test_at_most_64_hosts_are_asked_at_a_time():
    active, peaks, lock, full = [0], [], threading.Lock(), threading.Event()

    def question(_):
        with lock:
            active[0] += 1
            peaks.append(active[0])
            if active[0] == 64:
                full.set()
        full.wait(5)
        with lock:
            active[0] -= 1

    ask.at_once(question, [f"h{i}" for i in range(200)])
    assert (max(peaks), len(peaks)) == (64, 200)
