"""--spot against a metadata service on loopback."""

import json
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from launch.errors import HostError
from launch.hosts.ssh import SSH
from launch.run.supervise.spot import clouds, notices, watch
from launch.run.supervise.spot.clouds import CLOUDS, read_notice
from launch.run.supervise.spot.notices import Notices, hosts_ending, require_notices
from tests.metadata import ACTION, EVENTS, TIME, aws, events, interruption, plain, service
from tests.unit.machines import hosts
from tests.unit.run.supervise.test_screen import until

PREEMPTED, MAINTENANCE = (f"/computeMetadata/v1/instance/{key}" for key in ("preempted", "maintenance-event"))
AZURE = "Azure will preempt this instance"
RUNS_ON = {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}


@pytest.fixture
def answering(monkeypatch):
    """A function that starts a service of a cloud, which is the one of this instance until the end of the test."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    running = []

    def answer(cloud, values):
        running.append(service(aws if cloud == "aws" else plain, values))
        server, address = running[-1].__enter__()
        monkeypatch.setenv(clouds.ADDRESS_VARIABLE, address)
        return server

    yield answer
    for one in running:
        one.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("cloud", "values", "notice"),
    [
        ("aws", {}, None),
        ("aws", {"/latest/meta-data/events/recommendations/rebalance": json.dumps({"noticeTime": TIME})}, None),
        ("aws", {ACTION: interruption(TIME)}, f"AWS will terminate this instance at {TIME}"),
        ("gcp", RUNS_ON, None),
        ("gcp", {**RUNS_ON, MAINTENANCE: "MIGRATE_ON_HOST_MAINTENANCE"}, None),
        ("gcp", {**RUNS_ON, MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}, "will end this instance for maintenance"),
        ("gcp", {**RUNS_ON, PREEMPTED: "TRUE\n"}, "Google Cloud preempts this instance"),
        ("azure", events(), None),
        ("azure", events("Freeze"), None),
        ("azure", events("Freeze", "Reboot"), "Azure will reboot this instance"),
        ("azure", events("Preempt", resources=("vm_33", "other")), None),
        ("azure", events("Freeze", "Preempt", start=TIME), f"Azure will preempt this instance after {TIME}"),
        ("azure", events("Terminate", resources=("vm_1", "vm_3")), "Azure will terminate this instance"),
    ],
)
def test_what_is_an_end_and_what_is_none(answering, cloud, values, notice):
    answering(cloud, values)
    watched = CLOUDS[cloud]()
    for _ in range(2):  # AWS's token of the first time has expired
        found = read_notice(watched)
        assert found == notice if notice is None else notice in found


@pytest.mark.parametrize(
    ("cloud", "values", "problem"),
    [
        ("aws", {ACTION: (500, "")}, f"GET {ACTION}: status 500"),
        ("aws", {ACTION: "<html>"}, "its answer is malformed: "),
        ("aws", {ACTION: json.dumps({"action": 3})}, "action is 3, not a text"),
        ("gcp", {}, f"GET {PREEMPTED}: status 404"),
        ("gcp", {PREEMPTED: "<html>log in</html>"}, "instance/preempted is neither TRUE nor FALSE"),
        ("azure", {EVENTS: json.dumps({"Events": {}})}, "Events is {}, not a list"),
        ("azure", {EVENTS: json.dumps({"Events": ["x"]})}, "is 'x', not an object"),
        ("azure", {EVENTS: lambda _: time.sleep(1)}, "timed out"),
    ],
)
def test_a_broken_answer_is_an_error_in_one_line(answering, monkeypatch, cloud, values, problem):
    monkeypatch.setattr(clouds, "ENABLE_S", 0.2 if problem == "timed out" else 20.0)
    answering(cloud, values)
    with pytest.raises(HostError) as refused:
        read_notice(CLOUDS[cloud]())
    assert problem in str(refused.value)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_is_not_there_or_says_nothing_is_an_error_too(monkeypatch, cloud):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv(clouds.ADDRESS_VARIABLE, f"127.0.0.1:{deaf.getsockname()[1]}")
        with pytest.raises(HostError, match=r"^GET /: timed out$"):
            clouds.request("GET", "/", {}, timeout_s=0.1)
    with pytest.raises(HostError, match="refused"):
        read_notice(CLOUDS[cloud]())


def test_google_cloud_is_asked_to_answer_once_something_changes(answering):
    answered = iter(["FALSE", "TRUE"])
    server = answering("gcp", {**RUNS_ON, PREEMPTED: lambda _: next(answered)})
    cloud = CLOUDS["gcp"]()
    assert read_notice(cloud) is None
    assert "preempts" in read_notice(cloud)
    queries = [query for _, path, query, _ in server.asked if path == PREEMPTED]
    assert queries == ["", f"wait_for_change=true&last_etag=1&timeout_sec={clouds.WAIT_S}"]


def test_azure_is_told_to_go_on_with_what_ends_this_instance_only(answering):
    server = answering("azure", events("Freeze", "Preempt", "Terminate"))
    CLOUDS["azure"]().acknowledge()
    [body] = [body for command, path, query, body in server.asked if command == "POST"]
    assert json.loads(body) == {"StartRequests": [{"EventId": "Pr"}, {"EventId": "Te"}]}
    server.values |= events("Freeze")
    CLOUDS["azure"]().acknowledge()
    assert [command for command, *_ in server.asked].count("POST") == 1


def test_a_watcher_tells_of_failures_only_if_there_are_several_in_a_row(monkeypatch):
    answers = [HostError("a"), None, HostError("b"), HostError("c"), HostError("d"), HostError("e"), "the end"]

    def notice():
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    lines = list(watch.follow(SimpleNamespace(notice=notice, pause_s=0.0)))
    assert lines == ["", "", "", "", f"{watch.SILENT}d", "", f"{watch.MARK}the end"]


WATCH = [sys.executable, "-P", "-m", "launch.run.supervise.spot.watch", "azure"]


def test_a_watcher_ends_when_nobody_reads_it(answering):
    answering("azure", events())
    with subprocess.Popen([*WATCH, "follow"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watcher:
        assert watcher.stdout.readline() == b"\n"
        watcher.stdout.close()
        assert watcher.wait(10) != 0


def prepared(cloud, *names, local=("localhost",)):
    plan = SimpleNamespace(slots=[SimpleNamespace(host=name) for name in names], local=frozenset(local))
    plan.request = SimpleNamespace(spot=cloud)
    return SimpleNamespace(plan=plan, launcher=SimpleNamespace(python=sys.executable, ssh=SSH))


@pytest.fixture(autouse=True)
def no_slots(monkeypatch):
    monkeypatch.setattr(notices, "hosts_of", lambda slots: hosts(**{slot.host: 1 for slot in slots}))


def test_the_notice_of_a_host_is_heard_in_the_run_and_an_outage_is_told_once(answering, monkeypatch):
    monkeypatch.setattr(notices, "POLL_S", 0.0)
    server, lines = answering("azure", {EVENTS: (500, "")}), []
    with Notices(
        prepared("azure", "localhost"), SimpleNamespace(say=lambda line: lines.append(f"hvdlaunch: {line}\n".encode()))
    ) as watched:
        until(lambda: watched.poll() or lines)
        assert watched.why() == ""
        server.values |= events("Preempt")
        until(watched.poll)
    assert watched.why() == f"host localhost: {AZURE}"
    why = f"GET {EVENTS}?api-version=2020-07-01: status 500"
    warnings = [f"--spot azure cannot read its notices ({why}); trying again", f"{AZURE}; stopping the run"]
    assert lines == [f"hvdlaunch: warning: host localhost: {text}\n".encode() for text in warnings]
    assert "POST" not in [command for command, *_ in server.asked]  # it would end this process, too


def test_watchers_on_other_hosts_are_started_over_ssh_again_if_they_end_and_azure_may_then_end_the_host(monkeypatch):
    monkeypatch.setattr(notices, "POLL_S", 0.0)
    monkeypatch.setattr(notices, "AGAIN_S", 0.0)
    lines, asked = [], []
    run = prepared("azure", "h2")
    watchers = iter([["false"], ["sh", "-c", f"echo motd; echo '{watch.MARK}the end\x1b'; sleep 60"]])
    run.launcher.ssh = SimpleNamespace(
        command=lambda *_: next(watchers), ask=lambda host, words, *_, **__: asked.append((host, words))
    )
    with Notices(run, SimpleNamespace(say=lambda line: lines.append(f"hvdlaunch: {line}\n".encode()))) as watched:
        until(watched.poll)
    assert watched.hosts == {"h2": "the end\\x1b"}
    assert asked == [("h2", [*WATCH, "acknowledge"])]
    assert "the watcher there has ended" in lines[0].decode()


def test_before_a_start_every_host_must_be_heard_and_before_a_restart_those_that_are_ended_are_left_out(answering):
    server = answering("aws", {})
    require_notices(prepared(None, "localhost"))
    require_notices(prepared("aws", "localhost"))
    assert hosts_ending(["localhost"], "aws", ssh=SSH, python=sys.executable) == {}
    server.values[ACTION] = interruption(TIME)
    with pytest.raises(HostError, match=f"^host localhost: AWS will terminate this instance at {TIME}. Leave it out.$"):
        require_notices(prepared("aws", "localhost"))
    assert list(hosts_ending(["localhost"], "aws", ssh=SSH, python=sys.executable)) == ["localhost"]
    assert hosts_ending(["localhost"], None, ssh=SSH, python=sys.executable) == {}
    server.values[ACTION] = (500, "")
    line = r"^host localhost: --spot aws: GET .*: status 500\. Pass the cloud of this host, or leave --spot out\.$"
    with pytest.raises(HostError, match=line):
        require_notices(prepared("aws", "localhost"))
    assert hosts_ending(["localhost"], "aws", ssh=SSH, python=sys.executable) == {}
