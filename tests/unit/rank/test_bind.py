import json
import os
import signal
import socket

import pytest

from launch.rank import bind

HERE = socket.gethostname()
RANKS = [
    {
        "rank": 0,
        "host": "h1",
        "hostname": HERE,
        "local_rank": 0,
        "cores": "0",
        "environment": {"CUDA_VISIBLE_DEVICES": "a"},
    },
    {"rank": 1, "host": "h1", "hostname": HERE, "local_rank": 1, "cores": "1-2", "environment": {}},
]
PLAN = json.dumps({"ranks": RANKS})


def refused(capsys, action):
    with pytest.raises(SystemExit) as left:
        action()
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    assert err.startswith("hvdlaunch: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMIX_RANK": "1"},
        {"PMI_RANK": "1", "MPI_LOCALRANKID": "1"},
        {"HOROVOD_RANK": "1", "HOROVOD_LOCAL_RANK": "1"},
        {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_every_launchers_rank_finds_its_place(environment):
    assert bind.own_slot({"HVDLAUNCH_PLAN": PLAN, **environment}) == RANKS[1]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HVDLAUNCH_PLAN": PLAN},
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "2"},
        {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "one"},
        {"HVDLAUNCH_PLAN": "", "OMPI_COMM_WORLD_RANK": "0"},
        {"HVDLAUNCH_PLAN": "[]", "OMPI_COMM_WORLD_RANK": "0"},
        {"HVDLAUNCH_PLAN": '{"ranks": 5}', "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_process_without_a_place_is_refused(capsys, environment):
    err = refused(capsys, lambda: bind.own_slot(environment))
    assert err == "hvdlaunch: this process has no place in HVDLAUNCH_PLAN: start it with hvdlaunch run\n"


@pytest.mark.parametrize(
    ("environment", "changes", "line"),
    [
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            {},
            f"rank 0 was planned as local rank 0 on {HERE} but is local rank 1 on {HERE}",
        ),
        ({}, {"hostname": "other"}, f"rank 0 was planned as local rank 0 on other but is local rank 0 on {HERE}"),
        ({}, {"hostname": None}, f"rank 0 was planned as local rank 0 on None but is local rank 0 on {HERE}"),
    ],
)
def test_a_rank_in_another_place_than_planned_is_refused(capsys, environment, changes, line):
    plan = json.dumps({"ranks": [{**RANKS[0], **changes}]})
    err = refused(capsys, lambda: bind.own_slot({"HVDLAUNCH_PLAN": plan, "OMPI_COMM_WORLD_RANK": "0", **environment}))
    assert err == f"hvdlaunch: {line}: give every host its own name, once, in -H\n"


@pytest.mark.parametrize(
    ("cores", "allowed", "bound"),
    [
        ("0-3,8", {0, 1, 2, 3, 4, 8, 9}, {0, 1, 2, 3, 8}),
        ("0-3,8", {2, 3, 4}, {2, 3}),  # inside the cpuset
        ("5", {4, 5}, {5}),
        ("8-9", {0, 1}, None),  # nothing of it may be used
        ("", {0, 1}, None),
    ],
)
def test_a_rank_stays_on_those_of_its_cores_that_it_may_use(monkeypatch, cores, allowed, bound):
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, wanted: found.append((pid, wanted)))
    bind.bind_to(cores)
    assert found == ([] if bound is None else [(0, bound)])


@pytest.fixture
def process(monkeypatch):
    """This process as one that bind can change: what it did is noted, in order."""
    noted = []
    monkeypatch.setattr(bind, "die_with_parent", lambda: noted.append("parent"))
    monkeypatch.setattr(bind, "bind_to", noted.append)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: noted.append((how, signals)))
    monkeypatch.setattr(
        os, "environ", {"HVDLAUNCH_PLAN": PLAN, "OMPI_COMM_WORLD_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}
    )

    def become(program, argv):
        noted.append((program, argv, dict(os.environ)))
        if program == "missing":
            raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execvp", become)
    return noted


def test_a_rank_takes_its_place_then_becomes_the_program(process):
    bind.main(["--", "prog", "--", "-x"])
    *before, (program, argv, environment) = process
    assert before == ["parent", "0", (signal.SIG_BLOCK, {signal.SIGUSR1})]
    assert (program, argv) == ("prog", ["prog", "--", "-x"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "a"
    assert environment["HVDLAUNCH_CORES"] == ",".join(map(str, sorted(os.sched_getaffinity(os.getppid()))))


@pytest.mark.parametrize("argv", [[], ["--"], ["prog"]])
def test_no_program_is_refused(process, capsys, argv):
    usage = "hvdlaunch: usage: python -m launch.rank.bind -- PROGRAM [ARGUMENT]...\n"
    assert refused(capsys, lambda: bind.main(argv)) == usage
    assert process == ["parent"]


def test_a_program_that_is_missing_is_named_with_its_rank_and_host(process, capsys):
    err = refused(capsys, lambda: bind.main(["--", "missing"]))
    assert err == "hvdlaunch: rank 0 on h1 cannot start 'missing': No such file or directory\n"
