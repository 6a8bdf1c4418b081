"""The golden files hold the commands: `python -m tests.unit.start.test_command` writes them anew."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from launch.errors import CommandError
from launch.hosts import hostfile
from launch.probe.ssh import SSH, Ssh
from launch.start import command
from launch.start.sbatch import sbatch
from tests.unit.start.specs import HOROVODRUN, MPI4, MPI5, OURS, THREE, TRAIN, plan, rendered

GOLDEN = Path(__file__).parents[2] / "golden"
SPECS = {
    "openmpi4_one_host": rendered(),
    "openmpi4_hosts": rendered(where=THREE),
    "openmpi4_login_node": rendered(where=THREE, daemon_networks="10.0.0.0/24,192.168.0.0/16"),
    "openmpi4_root": rendered(as_root=True, exports=(*OURS, "NCCL_DEBUG")),
    "openmpi4_apptainer": rendered(where=THREE, program=command.in_apptainer(TRAIN, "/images/hvd train.sif")),
    "openmpi4_nsys": rendered(where=THREE, program=command.under_nsys(TRAIN)),
    "openmpi4_nsys_apptainer": rendered(program=command.in_apptainer(command.under_nsys(TRAIN), "/images/train.sif")),
    "openmpi5_nsys": rendered(MPI5, program=command.under_nsys(TRAIN)),
    "horovodrun_openmpi4_nsys": rendered(program=command.under_nsys(TRAIN), horovodrun=HOROVODRUN),
    "horovodrun_openmpi5_nsys": rendered(MPI5, program=command.under_nsys(TRAIN), horovodrun=HOROVODRUN),
    "openmpi5_one_host": rendered(MPI5),
    "openmpi5_hosts": rendered(MPI5, where=THREE),
    "horovodrun_openmpi4_one_host": rendered(horovodrun=HOROVODRUN),
    "horovodrun_openmpi4_hosts": rendered(where=THREE, horovodrun=HOROVODRUN),
    "horovodrun_openmpi5_one_host": rendered(MPI5, horovodrun=HOROVODRUN),
    "horovodrun_openmpi5_hosts": rendered(MPI5, where=THREE, horovodrun=HOROVODRUN),
}
LAUNCH = ["/opt/venv/bin/python", "-m", "launch", "run", "-np", "8", "-x", "NCCL_DEBUG", "--", *TRAIN, "--name", "it's"]
NOTHING_MORE = {"cores_per_rank": 1, "options": {}, "environment": {}}
SCRIPTS = {
    "sbatch_anywhere": sbatch(
        LAUNCH,
        name="hvdtrain.effnet",
        folder="/data/my runs",
        np=8,
        nodes=(),
        gpus=True,
        grace_s=25,
        cores_per_rank=16,
        options={"time": "4:00:00", "comment": "a b", "exclusive": None, "no-requeue": None},
        environment={"PATH": "/opt/my venv/bin:/bin", "PYTHONPATH": "", "SECRET": "s3cret!"},
    ),
    "sbatch_nodes": sbatch(
        LAUNCH, name="python", folder="/data", np=8, nodes=("node01", "node02"), gpus=False, grace_s=0.5, **NOTHING_MORE
    ),
    "sbatch_one_task_per_node": sbatch(
        LAUNCH,
        name="python",
        folder="/data",
        np=16,
        nodes=(),
        gpus=True,
        grace_s=25,
        cores_per_rank=4,
        options={"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "job-name": "mine"},
        environment={},
    ),
}


def golden_texts():
    texts = {name: lines(of_name.argv) for name, of_name in SPECS.items()}
    return {f"{name}.txt": text for name, text in texts.items()} | {
        f"{name}.sbatch": script for name, script in SCRIPTS.items()
    }


def lines(argv):
    """The words as a shell takes them: each option with its values on a line of its own, then the program."""
    program = argv.index("/opt/venv/bin/python")
    rows = []
    for word in argv[:program]:
        if word.startswith("-") or not rows:
            rows.append([])
        rows[-1].append(word)
    return " \\\n    ".join(map(shlex.join, [*rows, argv[program:]])) + "\n"


@pytest.mark.parametrize("name", golden_texts())
def test_commands_and_scripts_are_those_of_the_golden_files(name):
    assert golden_texts()[name] == (GOLDEN / name).read_text()


def test_every_golden_file_is_of_a_test():
    assert {path.name for path in GOLDEN.glob("*")} >= set(golden_texts())
    known = ("openmpi", "horovodrun", "sbatch")
    assert {path.name for path in GOLDEN.glob("*") if path.name.startswith(known)} == set(golden_texts())


def option(argv, name):
    return [argv[i + 1] for i, word in enumerate(argv) if word == name]


def mca(argv):
    """name -> value of all MCA parameters, of ranks and of daemons."""
    found = [tuple(argv[i + 1 : i + 3]) for i, word in enumerate(argv) if word in ("--mca", "--prtemca")]
    assert len(dict(found)) == len(found)
    return dict(found)


def inner(argv):
    """The words that mpirun gets in the end, through horovodrun too."""
    return [
        inside
        for word in argv
        for inside in (
            shlex.split(word.partition("=")[2]) if word.startswith(("--mpi-args=", "--binding-args=")) else [word]
        )
    ]


@pytest.mark.parametrize("name", SPECS)
def test_what_every_command_has(name):
    started = SPECS[name]
    words = inner(started.argv)
    parameters = mca(words)
    ssh = parameters["plm_ssh_args" if started.launcher.mpi.version[0] == 5 else "plm_rsh_args"]
    assert shlex.split(ssh) == list(SSH.arguments)
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "ServerAliveInterval=8"} <= set(shlex.split(ssh))
    assert [parameters[f"oob_tcp_keepalive_{name}"] for name in ("time", "intvl", "probes")] == ["8", "8", "4"]
    assert option(words, "--bind-to") == ["none"]
    assert option(words, "--map-by") == ["slot"]
    assert option(words, "-np") == [str(len(started.plan.slots))]
    assert words[words.index(started.launcher.python) :] == [
        started.launcher.python,
        "-P",
        "-m",
        "launch.rank.bind",
        "--",
        *started.plan.program,
    ]
    assert ("--allow-run-as-root" in words) is started.plan.as_root
    assert option(words, "-x") == ([] if started.launcher.horovodrun else list(started.plan.exports))
    if started.plan.network:
        ssh = parameters["prte_if_include" if started.launcher.mpi.version[0] == 5 else "oob_tcp_if_include"]
        assert ssh == started.plan.daemon_networks
        assert started.plan.network in (parameters.get("btl_tcp_if_include"), *option(words, "--network-interfaces"))
    assert ("--prefix" in words) is bool(started.launcher.horovodrun and started.plan.network)


@pytest.mark.parametrize("mpi", [MPI4, MPI5])
@pytest.mark.parametrize(
    ("variable", "left_out"),
    [
        ("OMPI_MCA_btl", "btl"),
        ("OMPI_MCA_btl_tcp_if_include", "btl_tcp_if_include"),
        ("OMPI_MCA_btl_tcp_if_exclude", "btl_tcp_if_include"),  # Open MPI takes one of the two
        ("PRTE_MCA_ras", "ras"),
        ("OMPI_MCA_oob_tcp_keepalive_time", "oob_tcp_keepalive_time"),
        ("OMPI_MCA_mpi_yield_when_idle", None),
        ("XOMPI_MCA_btl", None),
    ],
)
def test_what_the_user_has_set_of_open_mpi_stays(mpi, variable, left_out):
    before, after = rendered(mpi, where=THREE), rendered(mpi, where=THREE, mca=command.set_parameters({variable: "1"}))
    assert mca(before.argv).keys() - mca(after.argv).keys() == {left_out} - {None}


@pytest.mark.parametrize(
    "mpi", [replace(MPI4, name="MPICH", version=(4, 1)), replace(MPI4, version=(3, 1, 6)), replace(MPI4, version=(6,))]
)
def test_other_launchers_are_refused_with_their_path(mpi):
    with pytest.raises(CommandError, match=r"^/opt/openmpi/bin/mpirun is \S.* \d.*: Open MPI 4 or 5 is needed, put"):
        rendered(mpi)


@pytest.mark.parametrize(("mpi", "version"), [(MPI4, "rsh"), (MPI5, "ssh")])
@pytest.mark.parametrize("horovodrun", [None, HOROVODRUN])
def test_mpirun_reaches_hosts_as_hvdlaunch_does(mpi, version, horovodrun):
    def parameters(ssh):
        return mca(inner(rendered(mpi, where=THREE, horovodrun=horovodrun, ssh=ssh).argv))

    found = parameters(Ssh(options=("StrictHostKeyChecking=accept-new",), silence_s=4))
    assert found[f"plm_{version}_args"].startswith("-o StrictHostKeyChecking=accept-new -o BatchMode=yes ")
    assert found["oob_tcp_keepalive_intvl"] == "1"
    assert f"plm_{version}_agent" not in found
    found = parameters(Ssh(agent=("/opt/enter", "-q")))
    assert found[f"plm_{version}_agent"] == "/opt/enter -q"
    assert f"plm_{version}_args" not in found


def test_hosts_are_named_once_with_their_ranks():
    assert hostfile.to_option(command.hosts_of(plan(where=THREE).slots)) == "h1:2,h2.cluster.example:1"


def test_ranks_outlive_one_that_dies_with_open_mpi_5():
    words = rendered(MPI5, elastic=True).argv
    assert words[words.index("--with-ft") + 1] == "ulfm"
    assert words.index("--with-ft") < words.index("launch.rank.bind")
    assert "--with-ft" not in rendered(MPI5).argv


def test_newcomers_take_slots_that_are_not_free():
    assert "slot:OVERSUBSCRIBE" in rendered(MPI5, elastic=True, grow=True).argv
    assert "slot:OVERSUBSCRIBE" not in rendered(MPI5, elastic=True).argv


def test_newcomers_on_two_hosts_are_refused():
    with pytest.raises(CommandError, match=r"--grow: .* replacement ranks can join on one host only"):
        rendered(MPI5, elastic=True, grow=True, where=THREE)


@pytest.mark.parametrize(
    ("mpi", "horovodrun", "reason"),
    [(MPI4, None, "whose ranks do not outlive one that dies: MPI=5 make setup"), (MPI5, HOROVODRUN, "horovodrun")],
)
def test_other_launchers_of_an_elastic_run_are_refused(mpi, horovodrun, reason):
    with pytest.raises(CommandError, match=reason):
        rendered(mpi, horovodrun=horovodrun, elastic=True)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden_name, golden_text in golden_texts().items():
        (GOLDEN / golden_name).write_text(golden_text)
