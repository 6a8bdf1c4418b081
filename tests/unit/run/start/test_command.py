"""The golden files hold the commands: `python -m tests.unit.run.start.test_command` writes them anew."""

import shlex
from pathlib import Path

import pytest

from launch.errors import CommandError
from launch.hosts.ssh import Ssh
from launch.machine.mpi import from_environment
from launch.run.start import decide
from launch.run.start.request import Attempt
from launch.run.start.sbatch import sbatch
from tests.unit.run.start.specs import MPI4, MPI5, OURS, THREE, TRAIN, rendered

GOLDEN = Path(__file__).parents[3] / "golden"
PROFILED = decide.under_nsys(TRAIN, "OMPI_COMM_WORLD_RANK")
SPECS = {
    "openmpi4_one_host": rendered(
        as_root=True,
        exports=(*OURS, "NCCL_DEBUG"),
        program=decide.in_apptainer(PROFILED, "/images/hvd train.sif"),
    ),
    "openmpi4_hosts": rendered(where=THREE, daemon_networks="10.0.0.0/24,192.168.0.0/16"),  # from a login node
    "openmpi5_hosts": rendered(MPI5, where=THREE),
    "srun_hosts": rendered(where=THREE, kind="srun"),
    "horovodrun_openmpi4_hosts": rendered(where=THREE, kind="horovodrun"),
    "horovodrun_openmpi5_one_host": rendered(MPI5, program=PROFILED, kind="horovodrun"),
}
LAUNCH = ["/opt/venv/bin/python", "-m", "launch", "run", "-np", "8", "-x", "NCCL_DEBUG", "--", *TRAIN, "--name", "it's"]
MINE = {"name": "hvdtrain.effnet", "folder": "/data/my runs", "nodes": (), "gpus": True, "grace_s": 25}
OTHER = {"name": "python", "folder": "/data", "nodes": ("node01", "node02"), "gpus": False, "grace_s": 0.5}
SCRIPTS = {
    "sbatch_anywhere": {
        **MINE,
        "cores_per_rank": 16,
        "options": {"time": "4:00:00", "comment": "a b", "exclusive": None, "no-requeue": None},
        "environment": {"PATH": "/opt/my venv/bin:/bin", "PYTHONPATH": "", "SECRET": "s3cret!"},
    },
    "sbatch_nodes": {**OTHER, "cores_per_rank": 1, "options": {}, "environment": {}},
}


def golden_texts():
    commands = {f"{name}.txt": lines(run.argv) for name, run in SPECS.items()}
    return commands | {f"{name}.sbatch": sbatch(LAUNCH, np=8, **how) for name, how in SCRIPTS.items()}


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
    assert {path.name for path in GOLDEN.iterdir()} == {*golden_texts()}


def mca(argv):
    """name -> value of all MCA parameters, of ranks and of daemons."""
    found = [tuple(argv[i + 1 : i + 3]) for i, word in enumerate(argv) if word in ("--mca", "--prtemca")]
    assert len(dict(found)) == len(found)
    return dict(found)


def inner(argv):
    """The words that mpirun gets in the end, through horovodrun too."""
    nested = ("--mpi-args=", "--binding-args=")
    return [
        one for word in argv for one in (shlex.split(word.partition("=")[2]) if word.startswith(nested) else [word])
    ]


@pytest.mark.parametrize(
    ("mpi", "variable", "left_out"),
    [
        (MPI4, "OMPI_MCA_btl", {"btl"}),
        (MPI4, "OMPI_MCA_btl_tcp_if_exclude", {"btl_tcp_if_include"}),  # Open MPI takes one of the two
        (MPI4, "OMPI_MCA_oob_tcp_if_exclude", {"oob_tcp_if_include"}),
        (MPI5, "PRTE_MCA_prte_if_exclude", {"prte_if_include"}),
        (MPI5, "PRTE_MCA_ras", {"ras"}),
        (MPI5, "OMPI_MCA_ras", set()),  # its daemons do not read it
        (MPI4, "PRTE_MCA_ras", set()),
        (MPI4, "OMPI_MCA_plm_rsh_agent", set()),  # hvdlaunch probes with it
        (MPI4, "XOMPI_MCA_btl", set()),
    ],
)
def test_what_the_user_has_set_of_open_mpi_stays(mpi, variable, left_out):
    before, after = rendered(mpi, where=THREE), rendered(mpi, where=THREE, mca=from_environment({variable: "1"}))
    assert mca(before.argv).keys() - mca(after.argv).keys() == left_out


def test_what_ranks_may_not_use_does_not_go_with_horovodrun():
    changes = {"kind": "horovodrun", "mca": from_environment({"OMPI_MCA_btl_tcp_if_exclude": "lo"})}
    with pytest.raises(CommandError, match=r"^OMPI_MCA_btl_tcp_if_exclude=lo does not work with horovodrun.* unset it"):
        rendered(**changes)


@pytest.mark.parametrize(("mpi", "version"), [(MPI4, "rsh"), (MPI5, "ssh")])
@pytest.mark.parametrize("kind", ["mpirun", "horovodrun"])
def test_mpirun_reaches_hosts_as_hvdlaunch_does(mpi, version, kind):
    def parameters(ssh):
        return mca(inner(rendered(mpi, where=THREE, kind=kind, ssh=ssh).argv))

    found = parameters(Ssh(options=("StrictHostKeyChecking=accept-new",), silence_s=4))
    assert found[f"plm_{version}_args"].startswith("-o StrictHostKeyChecking=accept-new -o BatchMode=yes ")
    assert found["oob_tcp_keepalive_intvl"] == "1"
    assert found[f"plm_{version}_agent"] == "ssh"
    assert found[f"plm_{version}_disable_qrsh"] == "1"
    found = parameters(Ssh(agent=("/opt/enter", "-q")))
    assert found[f"plm_{version}_agent"] == "/opt/enter -q"
    assert f"plm_{version}_args" not in found


def test_srun_passes_the_job_on_and_what_mpirun_would_set():
    """Not the variables of the step that it is started in."""
    step = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    run = rendered(where=THREE, kind="srun", environment=step)
    given = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib,ofi", "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"}
    given |= {"SLURM_JOB_ID": "7", "PATH": "/bin"}
    assert {name: value for name, value in run.environment.items() if not name.startswith("HVDLAUNCH_")} == given
    own = from_environment({"OMPI_MCA_btl_tcp_if_exclude": "eth1"})
    assert "OMPI_MCA_btl_tcp_if_include" not in rendered(kind="srun", mca=own).environment


def test_a_run_that_may_start_again_does_not_wait_for_open_mpi_4_to_kill_its_ranks():
    again = {"attempt": Attempt(keeper="name")}
    commands = [rendered(mpi, **more).argv for mpi, more in ((MPI4, {}), (MPI4, again), (MPI5, again))]
    assert ["odls_base_sigkill_timeout" in words for words in commands] == [False, True, False]


if __name__ == "__main__":
    for golden_name, golden_text in golden_texts().items():
        (GOLDEN / golden_name).write_text(golden_text)
