import base64
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest

from launch.machine import local
from launch.run.rank import bind
from tests.unit.locked import held_by_bind, locked

HERE = socket.gethostname()
DIGITS = "f" * 32 + "00112233445566778899aabbccddeeff"
OTHER, UUID = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff", "GPU-00112233-4455-6677-8899-aabbccddeeff"
RANKS = [{"gpu": 3, "cores": [[0, 0]]}, {"gpu": 4, "cores": [[1, 2], [8, 8]]}]
GPU0 = {"gpu": 0, "gpu_uuid": None}
H0 = {"host": "h0", "hostname": "other", **GPU0, "cores": [], "environment": {}, "ranks": [{}]}
OWN = {"OMP_NUM_THREADS": "2", "TMPDIR": None}
H1 = {"host": "h1", "hostname": HERE, "gpu_uuids": DIGITS, "environment": OWN}
MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20000"}
START = {"executable": None, "path": "/a:/b", "show": "0", "terminals": [None, [24, 100]]}
START["attempt"] = {"restart": 2, "keeper": "name"}
START["rank_variables"] = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]
PLAIN = {**START, "rendezvous": MEET, "hosts": [H0, {**H1, "ranks": RANKS}]}


def packed(plan):
    text = plan if isinstance(plan, str) else json.dumps(plan)
    return base64.b64encode(zlib.compress(text.encode())).decode()


PLAN = packed(PLAIN)
OF_ANOTHER = json.dumps({"logs": "of another run"})


def facts_in(environment):
    return json.loads(environment["HVDLAUNCH_RANK"])


def refused(capsys, action, status=2):
    with pytest.raises(SystemExit) as left:
        action()
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (status, "")
    assert err.startswith("hvdlaunch: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("variables", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), ("PMIX_RANK", "NO")])
def test_a_rank_finds_its_place_by_the_variables_that_the_plan_names(variables):
    environment = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", variables[0]: "2"}
    environment |= {variables[1]: "1"} if variables[1] != "NO" else {}
    slot = bind.own_slot({"HVDLAUNCH_PLAN": packed({**PLAIN, "rank_variables": variables}), **environment})
    place = {"rank": 2, "local_rank": 1, "host": "h1", "gpu": 4, "gpu_uuid": UUID, "cores": {1, 2, 8}}
    assert {name: slot[name] for name in place} == place


@pytest.mark.parametrize(
    "environment",
    [
        {"HVDLAUNCH_PLAN": PLAN},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "3"},
        {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "-1"},
        {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "one"},
        {"HVDLAUNCH_PLAN": "no base64", "OMPI_COMM_WORLD_RANK": "1"},
        {"HVDLAUNCH_PLAN": json.dumps(PLAIN), "OMPI_COMM_WORLD_RANK": "1"},
        *({"HVDLAUNCH_PLAN": packed(text), "OMPI_COMM_WORLD_RANK": "1"} for text in ("", "5", "[" * 100_000)),
    ],
)
def test_a_process_without_a_place_is_refused(capsys, environment):
    err = refused(capsys, lambda: bind.own_slot(environment))
    assert err.startswith("hvdlaunch: error: this process has no place in HVDLAUNCH_PLAN: start it with hvdlaunch run")


@pytest.mark.parametrize(("local_rank", "planned_on"), [(1, HERE), (0, "other")])
def test_a_rank_in_another_place_than_planned_is_refused(capsys, local_rank, planned_on):
    plan = packed({**PLAIN, "hosts": [{**H1, "ranks": RANKS, "hostname": planned_on}]})
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
    slot = bind.own_slot({"HVDLAUNCH_PLAN": plan, **environment})
    err = refused(capsys, lambda: bind.require_planned_place(slot))
    line = f"rank 0 was planned as local rank 0 on {planned_on} but is local rank {local_rank} on {HERE}"
    assert err == f"hvdlaunch: error: {line}: list every host once in -H, under its own name\n"


def test_a_rank_sees_the_gpus_of_its_host_by_uuid_else_by_index():
    """In the order of the local ranks: `torch.cuda.set_device(local_rank)` is right, as under other launchers."""

    def visible(*gpus):
        return bind.visible_gpus([{"gpu": gpu, "gpu_uuid": uuid} for gpu, uuid in gpus])

    assert visible((3, UUID), (1, OTHER)) == f"{UUID},{OTHER}"
    assert visible((3, "GPU-00"), (1, None)) == "3,1"  # either is of all
    assert visible((None, None), (None, None)) == ""


def test_a_rank_stays_on_those_of_its_cores_that_it_may_use(monkeypatch):
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, wanted: found.append((pid, wanted)))
    for cores in ({0, 1, 8}, {1, 9}, {16, 17}):  # of the second not all may be used, of the third none
        bind.bind_to(cores)
    assert found == [(0, {0, 1, 8}), (0, {1})]


def test_cores_that_another_rank_may_use_are_not_a_ranks_own():
    def owners(*places):
        on_host = [{"local_rank": number, "cores": cores} for number, cores in enumerate(places)]
        return [bind.has_own_cores({**slot, "on_host": on_host}) for slot in on_host]

    assert owners({0, 8}, {1, 9}) == [True, True]
    assert owners({0, 1}, {1, 2}, {3}) == [False, False, True]
    assert owners({0}, set()) == [False, False]  # the other one is not bound
    assert owners({0, 1}) == [True]


@pytest.fixture
def process(monkeypatch):
    """This process as one that bind can change: what it did is noted, in order."""
    noted = []
    monkeypatch.setattr(bind.stand_in, "die_with", lambda _: noted.append("parent"))
    monkeypatch.setattr(bind.stand_in, "become_guard", lambda: 5)
    monkeypatch.setattr(bind.stand_in, "start", lambda *_, **__: None)
    monkeypatch.setattr(bind, "hold_gpus", lambda slots: noted.append([slot["gpu"] for slot in slots]))
    monkeypatch.setattr(bind, "bind_to", noted.append)
    monkeypatch.setattr(
        bind.forwarder, "rotate_log", lambda job, rank: noted.append(("rotate", job, rank)) or os.dup(0)
    )
    monkeypatch.setattr(bind.forwarder, "new_log", lambda job, rank: noted.append((job, rank)) or 7)
    monkeypatch.setattr(bind.forwarder, "start", lambda *of, **how: noted.append((*of, *how.values())) or 2)
    monkeypatch.setattr(bind.signal, "signal", lambda *_: None)  # those of pytest
    environment = {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "1", "CUDA_VISIBLE_DEVICES": "7", "TMPDIR": "/t"}
    environment["HVDLAUNCH_JOB"] = "mine"
    monkeypatch.setattr(os, "environ", environment)

    def become(program, argv):
        noted.append((program, argv, dict(os.environ)))
        if program == "missing":
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execvp", become)
    return noted


def test_the_users_own_flight_recorder_stays(process):
    users = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/mine/"}
    os.environ |= users
    bind.main(["--", "prog"])
    recorder = {name: value for name, value in process[-1][2].items() if name.startswith("TORCH_")}
    assert recorder == {**users, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_a_rank_takes_its_place_then_becomes_the_program(process):
    bind.main(["--", "prog", "--", "-x"])
    *before, (program, argv, environment) = process
    logs = Path.cwd() / "logs/mine"
    expected = {**MEET, "RANK": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "2", "PATH": "/a:/b"}
    expected |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": f"{OTHER},{UUID}", "PYTHONUNBUFFERED": "1"}
    expected |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": f"{logs}/torch-calls-"}
    facts = {**START["attempt"], "cores": sorted(os.sched_getaffinity(os.getppid())), "logs": str(logs)}
    kept = [("rotate", "mine", 1), [3, 4], ("mine", 1), (7, 1, False, [None, [24, 100]])]
    assert before == ["parent", *kept, {0}]
    assert (program, argv) == ("prog", ["prog", "--", "-x"])
    assert {name: environment[name] for name in expected} == expected
    assert facts_in(environment) == facts
    assert "TMPDIR" not in environment


def test_a_rank_becomes_what_the_users_shell_would_run(process):
    """Whatever this host has first in PATH; a script sees the words by which it was started."""
    known = {"/env/bin/prog": ("prog", "/env/bin/prog"), "/here/prog": ("./prog", "./prog"), None: ("prog", "prog")}
    for executable, (program, started) in known.items():
        os.environ |= {"HVDLAUNCH_PLAN": packed({**PLAIN, "executable": executable}), "OMPI_COMM_WORLD_RANK": "1"}
        bind.main(["--", program])
        assert process[-1][:2] == (started, [program])


def test_a_program_has_its_signals_as_the_launcher_leaves_them():
    script = (
        "import sys; from launch.run.rank import bind; bind.stand_in.become_guard = lambda: 5; "
        "bind.stand_in.start = lambda *_, **__: None; bind.main(sys.argv[1:])"
    )
    words = ["--", shutil.which("grep"), "-E", "Sig(Blk|Ign)", "/proc/self/status"]
    env = {**os.environ, "HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "2"}
    command = [sys.executable, "-c", script, *words]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    masks = {name: int(mask, 16) for name, mask in (line.split(":") for line in out.splitlines())}
    found = {
        name: {number for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGXFSZ) if mask >> (number - 1) & 1}
        for name, mask in masks.items()  # others are those of whoever has started the tests
    }
    assert found == {"SigBlk": set(), "SigIgn": set()}


def test_a_rank_finds_the_others_as_torch_does():
    places = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    places |= {"ROLE_RANK": "2", "ROLE_WORLD_SIZE": "3", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert bind.slot_of(2, PLAIN)["environment"] == {**places, **MEET, **OWN}
    assert bind.slot_of(2, {**PLAIN, "rendezvous": {}})["environment"] == {**places, **OWN}


@pytest.mark.parametrize("argv", [["--"], ["prog"]])
def test_no_program_is_refused(process, capsys, argv):
    usage = "hvdlaunch: error: usage: python -m launch.run.rank.bind -- PROGRAM [ARGUMENT]...\n"
    assert refused(capsys, lambda: bind.main(argv)) == usage
    assert process == ["parent"]


@pytest.mark.parametrize(("rank", "show", "all_ranks"), [("0", "0", False), ("1", "all", True)])
def test_what_is_shown_stands_in_the_plan(process, rank, show, all_ranks):
    plan = packed({**PLAIN, "show": show, "hosts": PLAIN["hosts"][1:]})
    os.environ |= {"HVDLAUNCH_PLAN": plan, "OMPI_COMM_WORLD_RANK": rank, "HVDLAUNCH_RANK": OF_ANOTHER}
    bind.main(["--", "prog"])
    assert (7, int(rank), all_ranks, [None, [24, 100]]) in process


def test_without_the_name_of_a_job_nothing_is_kept(process):
    del os.environ["HVDLAUNCH_JOB"]
    os.environ["HVDLAUNCH_RANK"] = OF_ANOTHER
    bind.main(["--", "prog"])
    assert process[:3] == ["parent", [3, 4], {0}]
    assert "logs" not in facts_in(os.environ)


@pytest.mark.parametrize("why", ["its place", "its GPU"])
def test_a_rank_that_is_refused_has_no_words_of_an_attempt_before(process, monkeypatch, why):
    if why == "its place":
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "1"
    monkeypatch.setattr(bind, "hold_gpus", lambda _: bind.refuse("GPU 3 of h1 was claimed by another run of yours", 75))
    with pytest.raises(SystemExit):
        bind.main(["--", "prog"])
    assert process == ["parent", ("rotate", "mine", 1)]


@pytest.mark.parametrize(("rank", "told"), [("1", True), ("2", False)])
def test_a_host_that_takes_no_log_says_so_once_and_its_ranks_run(process, capsys, monkeypatch, rank, told):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(bind.forwarder, "new_log", Mock(side_effect=full))
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "HVDLAUNCH_RANK": OF_ANOTHER}
    bind.main(["--", "prog"])
    assert process[-1][0] == "prog"
    assert "logs" not in facts_in(process[-1][2])
    line = "hvdlaunch: warning: logs/mine on h1 cannot be written: No space left on device: "
    line += "the output of its ranks is shown but not kept\n"
    assert capsys.readouterr().err == (line if told else "")


def test_a_program_that_is_missing_is_named_with_its_rank_and_host(process, capsys):
    err = refused(capsys, lambda: bind.main(["--", "missing"]))
    assert err == "hvdlaunch: error: rank 1 on h1 cannot start 'missing': No such file or directory\n"


@pytest.fixture
def lock_folder(tmp_path, monkeypatch):
    """A folder for locks of the test's own; what bind keeps open is closed at the end."""
    opened = []
    keep = os.set_inheritable

    def kept(file, inheritable):
        opened.append(file)
        keep(file, inheritable)

    monkeypatch.setattr(os, "set_inheritable", kept)
    for module in (bind, local):
        monkeypatch.setattr(module, "LOCKS", str(tmp_path / "locks"))
    yield tmp_path / "locks"
    for file in opened:
        os.close(file)


def on(*uuids):
    return [{"host": "h1", "gpu": gpu, "gpu_uuid": uuid} for gpu, uuid in enumerate(uuids)]


def test_the_gpus_of_a_host_are_held_by_the_program_in_a_folder_that_is_closed_to_others(lock_folder):
    with held_by_bind(lock_folder, "GPU-b", "GPU-a", "../GPU-c", program="echo ready") as (pid, _):
        assert local.held_gpus(["GPU-a", "GPU-b", "../GPU-c", "GPU-d"]) == {"GPU-a": pid, "GPU-b": pid, "../GPU-c": pid}
    assert {file.name for file in lock_folder.iterdir()} == {"GPU-a.lock", "GPU-b.lock", ".._GPU-c.lock"}
    assert lock_folder.stat().st_mode & 0o777 == 0o700


def test_what_the_program_leaves_behind_holds_no_gpu(lock_folder):
    with held_by_bind(lock_folder, "GPU-a", program="sleep 100 > /dev/null & echo $!") as (pid, child):
        assert local.held_gpus(["GPU-a"]) == {"GPU-a": pid}
    try:
        os.kill(int(child), 0)  # it lives on
        assert local.held_gpus(["GPU-a"]) == {}
        bind.hold_gpus(on("GPU-a"))
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_gpu_that_another_run_has_taken_is_refused_in_a_line_that_is_reported(
    lock_folder, tmp_path, monkeypatch, capsys
):
    report = tmp_path / "report.json"
    monkeypatch.setenv("HVDLAUNCH_REPORT", str(report))
    lock_folder.mkdir(mode=0o700)
    with locked(lock_folder / "GPU-b.lock") as pid:
        line = refused(capsys, lambda: bind.hold_gpus(on("GPU-x", "GPU-b")), status=75)
        why = f"GPU 1 of h1 was claimed by another run of yours (pid {pid}) after planning"
        assert line == f"hvdlaunch: error: {why}. Run the command again for other free GPUs.\n"
        assert json.loads(report.read_text()) == {"said": line.strip()}
        report.write_text("{}")
        refused(capsys, lambda: bind.hold_gpus(on("GPU-b")), status=75)
    assert report.read_text() == "{}"  # somebody was first


@pytest.mark.parametrize("planted", ["link", "file", "open to all", "another user's"])
def test_a_folder_for_locks_that_others_have_planted_is_not_used(lock_folder, tmp_path, monkeypatch, capsys, planted):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted == "link":
        lock_folder.symlink_to(elsewhere)
    elif planted == "file":
        lock_folder.touch()
    else:
        lock_folder.mkdir(mode=0o700)
        if planted == "open to all":
            lock_folder.chmod(0o777)
        else:
            monkeypatch.setattr(os, "getuid", lambda: 4242)
    bind.hold_gpus(on("GPU-a"))
    line = f"hvdlaunch: warning: {lock_folder} on {HERE} is not private to you: GPUs are not locked\n"
    assert capsys.readouterr().err == line
    assert not list(elsewhere.iterdir())


def test_a_file_system_without_locks_stops_no_rank(lock_folder, monkeypatch):
    for ask in ("lockf", "fcntl"):
        monkeypatch.setattr(bind.fcntl, ask, Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    bind.hold_gpus(on("GPU-a"))
    assert local.held_gpus(["GPU-a"]) == {}


def test_without_a_place_for_locks_there_are_none_nor_on_cpus(lock_folder, monkeypatch, tmp_path):
    bind.hold_gpus([{"host": "h1", "gpu": None, "gpu_uuid": None}])
    assert not lock_folder.exists()
    monkeypatch.setattr(bind, "LOCKS", str(tmp_path / "missing" / "locks"))
    bind.hold_gpus(on("GPU-a"))


def test_the_first_rank_of_a_host_holds_the_gpus_of_all(process):
    os.environ["OMPI_COMM_WORLD_RANK"] = "2"
    bind.main(["--", "prog"])
    assert [3, 4] not in process
    assert process[-1][2]["CUDA_VISIBLE_DEVICES"] == f"{OTHER},{UUID}"
