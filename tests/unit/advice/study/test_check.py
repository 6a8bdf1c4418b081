import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from launch.advice.study import check
from launch.advice.study.speed import Speed, Speeds
from launch.cli import main as cli
from launch.errors import HostError, PlacementError
from launch.hosts.host_facts import HostFacts
from launch.machine.mpi import Mpi, Parameter
from launch.placement.findings import Finding
from launch.run.start import facts, prepare
from launch.run.supervise.run import RunResult
from tests.unit.machines import SOFTWARE, condition, hosts, machine, request

SPEEDS = Speeds(hosts={"h1": (Speed(name="H100", tflops=700.0, gb_per_s=2900.0),)}, gpus={"h1": [0]})
MPI = Mpi(path="/bin/mpirun", name="Open MPI", version=(4, 1, 8))


@pytest.fixture
def world(monkeypatch):
    """Hosts that answer as the test says; h1 is this machine."""
    found, asked = {}, []
    for number in (1, 2, 3):
        own = machine(interfaces=(("eth0", f"10.0.0.{number}/24"),))
        names = {"host": f"h{number}", "hostname": f"node{number}"}
        found[f"h{number}"] = HostFacts(**names, topology=own, mpi=MPI, condition=condition())

    def probe_hosts(names, **how):
        asked.append((list(names), how))
        return {name: found[name] for name in names}

    monkeypatch.setattr(check, "probe_hosts", probe_hosts)
    monkeypatch.setattr(check, "is_local", lambda host: host in ("h1", "localhost"))
    monkeypatch.setattr(prepare, "try_networks", lambda tried, *_, **__: [""] * len(tried))
    monkeypatch.setattr(check, "launcher_of", lambda _: type("Launcher", (), {"mpi": MPI}))
    monkeypatch.setattr(facts, "is_local", check.is_local)
    monkeypatch.setattr(check, "run", lambda *_, **__: RunResult(status=0, run_folder=None, why=None, stopped=False))
    slow = Finding(severity="warning", hosts=("h2",), about="speed", problem="it is slow", remedy="wait")
    monkeypatch.setattr(check, "measure_speeds", lambda *_: (SPEEDS, [slow]))
    found["localhost"] = replace(found["h1"], host="localhost")
    return found, asked


def checked(tmp_path, environment=None, **changes):
    wanted = {"hosts": hosts(h1=4, h2=4, h3=4), **changes}
    return check.check(request(**wanted), environment or {}, tmp_path, runs_dir="runs", data_dir="/data")


def test_hosts_with_nothing_wrong(world, tmp_path):
    result = checked(tmp_path)
    assert (result.status, result.findings, result.shared.name) == (0, (), "10.0.0.0/24")
    lines = check.text(result).splitlines()
    assert lines[-1] == "3 hosts: nothing is wrong"
    assert ["reached", "yes", "all"] in [line.split() for line in lines]
    ((names, how),) = world[1]
    assert names == ["h1", "h2", "h3"]
    assert how["inspection"].folders == (str(tmp_path / "runs"), "/data")
    assert how["ssh"].options == ("ConnectTimeout=4",)
    assert list(tmp_path.iterdir()) == []


def test_speeds_and_slow_hosts_are_shown_unless_there_is_an_error(world, tmp_path):
    result = check.with_speeds(checked(tmp_path), request(), tmp_path)
    lines = [
        "H100: 700 TFLOP/s, 2,900 GB/s, the median of 1",
        "",
        "warning: h2: it is slow. Wait.",
        "3 hosts: 1 warning",
    ]
    assert check.text(result).splitlines()[-4:] == lines
    assert json.loads(check.to_json(result))["speeds"]["hosts"]["h1"][0]["tflops"] == 700
    world[0]["h2"] = HostError("host h2: gone")
    assert check.with_speeds(wrong := checked(tmp_path), request(), tmp_path) == wrong


def test_mpirun_starts_its_daemons_as_a_run_would_and_obeys_the_files_that_it_names(world, tmp_path, monkeypatch):
    run = Mock(return_value=RunResult(status=1, run_folder=None, why="host h2 is not reached", stopped=False))
    monkeypatch.setattr(check, "run", run)
    line = Parameter(name="ras", value="slurm", where="/etc/a.conf:3", of_prrte=False, in_file=True)
    error, note = checked(tmp_path, parameters=(line,)).findings
    assert (error.severity, error.about, note.problem) == ("error", "daemons", "/etc/a.conf:3: ras = slurm is kept")
    assert "host h2 is not reached" in error.problem
    (prepared,) = run.call_args.args
    assert prepared.argv[prepared.argv.index("-H") + 1] == "localhost:1,h2:1,h3:1"
    assert "ras" not in prepared.argv
    one = checked(tmp_path, hosts=None)
    assert (list(one.hosts), one.shared, one.status, one.findings) == (["localhost"], None, 0, ())
    assert check.text(one).splitlines()[-1] == "1 host: nothing is wrong"
    run.assert_called_once()


NO_TORCH = condition(software=replace(SOFTWARE, torch=None))
OLDER, SAME = {"other_version": "0123456789ab"}, {"hostname": "node1"}  # than here, as h1
UNKNOWN = HostError("host h3: its host key is unknown: connect to it once by hand")


@pytest.mark.parametrize(
    ("changes", "wrong", "totals"),
    [
        ({"h2": {"mpi": None}, "h3": UNKNOWN}, ["reached of h3", "MPI of h2"], "2 errors"),
        ({"h2": {"condition": condition(shm_free_mib=1)}}, ["/dev/shm of h2"], "1 warning"),  # noqa: S108
        ({"h2": OLDER, "h3": OLDER}, ["project of h2, h3"], "1 error"),  # this machine's is another
        ({"h2": SAME, "h3": {"condition": NO_TORCH}}, ["network of h1, h2, h3", "torch of h3"], "2 errors"),
        ({"h2": {"topology": machine()}}, ["network of h1, h2, h3"], "1 error"),
    ],
)
def test_all_faults_of_all_hosts_are_told_and_an_error_is_status_1(world, tmp_path, changes, wrong, totals):
    found, _ = world
    for host, change in changes.items():
        found[host] = change if isinstance(change, HostError) else replace(found[host], **change)
    result = checked(tmp_path)
    assert [f"{one.about} of {', '.join(one.hosts)}" for one in result.findings] == wrong
    assert all(one.problem and one.remedy for one in result.findings)
    *lines, last = check.text(result).splitlines()
    assert last == f"3 hosts: {totals}"
    assert result.status == ("error" in totals)
    if UNKNOWN in changes.values():
        assert {("reached", "yes", "h1,", "h2"), ("no", "h3")} <= {tuple(line.split()) for line in lines}


@pytest.mark.parametrize(("slots", "faults"), [(64, []), (4, ["GPUs"])])
def test_slots_that_are_cores_are_no_fault(world, tmp_path, slots, faults):
    taken = replace(world[0]["h1"].topology, gpus=machine(unusable={1: "busy: pid 7"}).gpus)
    world[0]["localhost"] = replace(world[0]["localhost"], topology=taken)
    found = checked(tmp_path, hosts=hosts(localhost=slots)).findings
    assert [one.about for one in found if one.severity == "error"] == faults


def test_a_host_that_tells_nothing_leaves_nothing_else_to_judge(world, tmp_path):
    for name in ("h1", "h2", "h3"):
        world[0][name] = HostError(f"host {name}: connection refused. Start sshd on h2")
    result = checked(tmp_path)
    assert [one.hosts for one in result.findings] == [("h1", "h2", "h3")]  # for the same reason
    assert json.loads(check.to_json(result))["hosts"] == dict.fromkeys(("h1", "h2", "h3"))


def test_inside_an_image_the_software_of_the_hosts_does_not_count(world, tmp_path):
    found, _ = world
    found["h2"] = replace(found["h2"], condition=condition(software=replace(SOFTWARE, torch=None)))
    assert checked(tmp_path).status == 1
    assert checked(tmp_path, apptainer="a.sif").findings == ()


REFUSED = {"ranks_per_replica": (3, "--ranks-per-replica 3: "), "gpus": ((0, 1), "--gpus names 2 for the 4 ranks on")}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_would_refuse_on_whatever_hosts_is_refused_before_any_is_asked(world, tmp_path, name):
    value, problem = REFUSED[name]
    with pytest.raises(PlacementError, match=problem):
        checked(tmp_path, **{"np": None, "hosts": hosts(h1=4, h2=4), name: value})
    assert world[1] == []


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_a_table_or_json_and_ends_with_the_status(world, tmp_path, monkeypatch, capsys, as_json):
    found, _ = world
    bad = "2.10\x1b[2J"
    found["h2"] = replace(found["h2"], condition=condition(software=replace(SOFTWARE, torch=bad)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(["check", "-H", "h1:4,h2:4", "--runs-dir", "mine", *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert (left.value.code, err) == (1, "")
    assert "\x1b" not in out
    if as_json:
        document = json.loads(out)
        assert list(document["hosts"]) == ["h1", "h2"]
        assert document["hosts"]["h2"]["condition"]["software"]["torch"] == bad
        assert [(one["severity"], one["about"]) for one in document["findings"]] == [("error", "torch")]
    else:
        assert "error: h2: torch 2.10\\x1b[2J, on h1 2.11.0. Run `make setup` there" in out
    assert world[1][0][1]["inspection"].folders[0] == str(tmp_path / "mine")
