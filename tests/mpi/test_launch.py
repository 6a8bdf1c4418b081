"""hvdlaunch with the real mpirun and horovodrun: which GPUs and cores the ranks get, and what is started."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from launch.run.rank import bind
from tests.mpi.conftest import EFFNET, PROGRAMS
from tests.mpi.launched import (
    NO_NVML,
    PLACE,
    argv,
    finished,
    lines,
    planned,
    ranks,
    recorder,
    running,
    stand_in,
    started,
)
from tests.unit.machine.test_nvml import MATRIX, QUERY

HERE = os.uname().nodename
# Both NVLinks of 0-3 and of 1-2 and one of each other pair of the four: two link-disjoint rings, one of them 0-1-2-3.
RING = [0, 1, 2, 3]
# A lock is held for each UUID: those of another worker of the tests are others.
OURS = f"GPU-{os.getpid()}-"
UUIDS = [f"{OURS}{gpu}{gpu}" for gpu in RING]
DRIVER = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="a real driver answers before a stand-in for nvidia-smi"
)


def v100s(folder):
    """A machine with eight V100, as nvidia-smi tells it; hvdlaunch asks exactly this."""
    answers = {
        "topo -m": MATRIX,
        "--query-gpu=index,uuid,name,pci.bus_id,mig.mode.current --format=csv,noheader": QUERY.replace("GPU-", OURS),
        "--query-compute-apps=gpu_uuid,pid --format=csv,noheader": "",
    }
    script = f"import sys\nsys.stdout.write({answers!r}[' '.join(sys.argv[1:])])\n"
    return stand_in(folder, "nvidia-smi", script)


@pytest.fixture
def nvidia_smi(tmp_path):
    yield v100s(tmp_path)
    for file in Path(bind.LOCKS).glob(f"{OURS}*"):
        file.unlink()


@DRIVER
def test_four_ranks_train_on_the_best_four_gpus(tmp_path, nvidia_smi):
    told = json.loads(finished(tmp_path, argv("gpus", "-k", "4", "--json")).stdout)
    assert (told["gpus"], told["ring"]) == (RING, RING)
    train = ["python", *EFFNET, "--data", "digits", "--model", "efficientnet_tiny"]
    train += ["--epochs", "1", "--batch-size-per-rank", "32", "--images=256", "--run", "r"]
    done = finished(tmp_path, argv("-np", "4", "--gpus", "all", "-x", "NCCL_DEBUG", program=train), NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "effnet" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["np"], result["exit_reason"]) == (4, "finished")
    placement = json.loads((folder / "placement.json").read_text())
    assert [(one["rank"], one["local_rank"]) for one in placement["ranks"]] == [(rank, rank) for rank in range(4)]
    assert [one["cuda_visible_devices"] for one in placement["ranks"]] == [",".join(UUIDS)] * 4
    plan = placement["plan"]
    assert [(one["gpu"], one["gpu_uuid"]) for one in plan["ranks"]] == list(zip(RING, UUIDS, strict=True))
    assert [one["local_rank"] for one in plan["ranks"]] == RING
    assert plan["environment"] == {"NCCL_DEBUG": "WARN"}
    assert json.loads((folder / "environment.json").read_text())["nccl_settings"] == {"NCCL_DEBUG": "WARN"}


# A stand-in for srun that has PMIx, and starts the tasks of a step on this host as it would.
SRUN = """\
import os, subprocess, sys
if "--mpi=list" in sys.argv:
    sys.exit(print("MPI plugin types are...\\n\\tpmix_v4\\n\\tpmix"))
tasks = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--ntasks="))
program = next(at for at, word in enumerate(sys.argv[1:], 1) if not word.startswith("-"))
here = [{**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(tasks)]
steps = [subprocess.Popen(sys.argv[program:], env=environment) for environment in here]
sys.exit(max(step.wait() for step in steps))
"""


@DRIVER
def test_mpirun_horovodrun_and_srun_give_the_same_place(tmp_path, nvidia_smi):
    words = ["--gpus", "all", "--bind", "cores", "-x", "NCCL_DEBUG"]
    found = {}
    stand_in(tmp_path, "srun", SRUN)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": HERE, "SLURM_TASKS_PER_NODE": "2"}
    for launcher in ("mpirun", "horovodrun", "srun"):
        (tmp_path / launcher).mkdir()
        program, more = [*PLACE[:-1], launcher], job if launcher == "srun" else {}
        done = finished(tmp_path, argv(*words, "--launcher", launcher, program=program), NCCL_DEBUG="WARN", **more)
        assert done.returncode == 0, done.stdout + done.stderr
        found[launcher] = ranks(tmp_path / launcher)
    for launcher, places in found.items():
        for rank, one in enumerate(places):
            assert (one["rank"], one["local_rank"], one["host"]) == (rank, rank, HERE), launcher
            assert (one["blocked"], one["death_signal"]) == ([], signal.SIGKILL), launcher
            own = one["environment"]
            own.pop("NCCL_SOCKET_IFNAME", None)  # horovodrun's own idea on one host: lo
            threads = own.pop("OMP_NUM_THREADS")
            assert threads == str(len(one["cores"])) or len(os.sched_getaffinity(0)) == 1
            assert own == {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": f"{OURS}00,{OURS}33",  # the pair with two NVLinks
                "NCCL_DEBUG": "WARN",
            }, launcher
        assert [one["cores"] for one in places] == [one["cores"] for one in found["mpirun"]], launcher


@DRIVER
def test_launches_at_once_take_different_gpus(tmp_path, nvidia_smi):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        v100s(folder)
    taken = [f"{OURS}00,{OURS}33"] * 2
    with started(first, argv("--gpus", "all", program=[*PLACE, "--stay"])):
        places = running(first)
        assert [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in places] == taken
        done = finished(second, argv("--gpus", "all", program=PLACE))
        assert done.returncode == 0, done.stderr
        assert NO_NVML in done.stderr
        others = [one["environment"]["CUDA_VISIBLE_DEVICES"] for one in ranks(second)]
        assert others == [f"{OURS}11,{OURS}22"] * 2
        done = finished(second, argv("--gpus", "0,3", program=PLACE))
        assert done.returncode == 2
        (line,) = lines(done)
        holder = psutil.Process(places[0]["pid"]).ppid()  # it stands for the first rank
        why = f"busy: pid {holder}, another run of yours"
        assert line == f"hvdlaunch: error: GPU 0 of host localhost cannot be used ({why}): choose others with --gpus"
    told = json.loads(finished(tmp_path, argv("gpus", "-k", "2", "--json")).stdout)
    assert told["gpus"] == [0, 3]


def test_ranks_on_cpus_see_no_gpu_and_have_cores_and_sessions_of_their_own(tmp_path):
    assert finished(tmp_path, argv(program=PLACE)).returncode == 0
    first, second = ranks(tmp_path)
    allowed = os.sched_getaffinity(0)
    assert set(first["cores"]) | set(second["cores"]) <= allowed
    assert first["environment"]["CUDA_VISIBLE_DEVICES"] == second["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    if len(allowed) > 1:
        assert not set(first["cores"]) & set(second["cores"])
        assert [first["session"], second["session"]] == [first["pid"], second["pid"]]


def test_a_plan_ends_with_what_a_run_executes(tmp_path):
    """Word for word, by a stand-in for the launcher; and a shell that is given the line does the same."""
    record = recorder(tmp_path, "mpirun")
    own = ("-x", "MINE", "-x", "MASTER_PORT")  # else each plan has another port
    words = argv(*own, program=["echo", "two words", "$(x)", "'", "a=b"])
    more = {"HVDLAUNCH_JOB": "job", "MINE": "a 'b' $c", "MASTER_PORT": "29500"}
    settings, command, line = planned(tmp_path, words, **more)
    assert not record.exists()
    assert finished(tmp_path, words, **more).returncode == 0
    by_run = json.loads(record.read_text())
    assert by_run["argv"] == command
    assert command[0] == str(tmp_path / "bin" / "mpirun")
    assert command[-5:] == ["echo", "two words", "$(x)", "'", "a=b"]
    report = by_run["environment"].pop("HVDLAUNCH_REPORT")
    assert not Path(report).parent.exists()
    assert settings == {
        **{name: by_run["environment"][name] for name in ("HVDLAUNCH_PLAN", "HVDLAUNCH_JOB")},
        "HVDLAUNCH_REPORT": "",
    }
    assert finished(tmp_path, ["sh", "-c", line], **more).returncode == 0
    by_shell = json.loads(record.read_text())
    assert by_shell["environment"].pop("HVDLAUNCH_REPORT") == ""
    for record in (by_run, by_shell):
        for name in ("_", "PWD", "OLDPWD", "SHLVL"):  # the shell's own
            record["environment"].pop(name, None)
    assert by_shell == by_run


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh, whose arguments mpirun gets")
def test_words_with_spaces_reach_mpirun_through_horovodrun(tmp_path):
    record = recorder(tmp_path, "mpirun")
    done = finished(tmp_path, argv("--launcher", "horovodrun", program=["echo", "two words", "$(touch x)"]))
    assert done.returncode == 0, done.stderr
    words = json.loads(record.read_text())["argv"]
    assert words[-2:] == ["two words", "$(touch x)"]
    assert "BatchMode=yes" in words[words.index("plm_rsh_args") + 1]
    assert "StrictHostKeyChecking=yes" in words[words.index("plm_rsh_args") + 1]
    assert [words[words.index(name) + 1] for name in ("--bind-to", "--map-by", "-np", "-H")] == [
        "none",
        "slot",
        "2",
        "localhost:2",
    ]
    assert not (tmp_path / "x").exists()


def test_apptainer_holds_the_program(tmp_path):
    """By a recording stand-in, which runs what stands behind the image: Apptainer is not to be had everywhere."""
    (tmp_path / "image.sif").touch()
    record = tmp_path / "apptainer.jsonl"
    stand_in(
        tmp_path,
        "apptainer",
        "import json, os, sys\n"
        f"with open({str(record)!r}, 'a') as file:\n    file.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "at = next(i for i, word in enumerate(sys.argv) if word.endswith('.sif'))\n"
        "image, words = sys.argv[at], sys.argv[at + 1:]\n"
        "if words == ['mpirun', '--version']:\n    sys.exit(print('mpirun (Open MPI) 4.0.5'))\n"
        "os.environ['INSIDE'] = image\n"
        "os.execvp(words[0], words)\n",
    )
    done = finished(tmp_path, argv("--apptainer", "image.sif", program=PLACE))
    assert done.returncode == 0, done.stderr
    assert [one["inside"] for one in ranks(tmp_path)] == ["image.sif"] * 2
    assert [one["blocked"] for one in ranks(tmp_path)] == [[]] * 2
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert calls == [["exec", "image.sif", "mpirun", "--version"], *[["exec", "--nv", "image.sif", *PLACE]] * 2]


DDP = [sys.executable, str(PROGRAMS / "ddp.py"), "."]


def test_a_script_for_torchrun_starts_as_it_is(tmp_path):
    # What a shell or another job has left must not lead astray.
    stale = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = finished(tmp_path, argv(program=DDP), **stale)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done) == []
    found = ranks(tmp_path)
    assert [one["gradient"] for one in found] == [[1.5] * 4] * 2  # the mean of both
    assert found[0]["weight"] == found[1]["weight"]
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [[one[name] for name in places] for one in found] == [
        ["0", "2", "0", "2", "127.0.0.1"],
        ["1", "2", "1", "2", "127.0.0.1"],
    ]
