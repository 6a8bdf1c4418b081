"""The set-up scripts, started for real, with stand-ins for what they would download or compile."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "env", "dirname", "tr", "grep", "paste", "sha256sum", "cat", "df", "tail", "cut", "sed", "head",
         "mktemp", "mkdir", "rm", "mv", "ln", "ls", "nproc", "getconf", "flock", "sleep", "chmod")  # fmt: skip


@pytest.fixture
def machine(tmp_path):
    """A clone, and a PATH with nothing on it but the basic tools, a compiler and this Python."""
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copytree(PROJECT / "scripts", clone / "scripts")
    for file in (*PROJECT.glob("requirements*.lock"), PROJECT / "pyproject.toml", PROJECT / "Makefile"):
        shutil.copy(file, clone)
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
    return subprocess.run(
        [str(clone / "scripts" / script), *words],
        env={"PATH": str(programs), "HOME": str(clone), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def stand_in(machine, tmp_path, pip, build="echo horovod.whl"):
    """A venv module whose python runs `pip` for pip, and a build; what pip is asked is written down."""
    clone, programs = machine
    asked = tmp_path / "asked"
    asked.touch()
    put(
        tmp_path / "python-of-venv",
        'case "$*" in *pip*) echo "$@" >>{}; {};; *version_info*) echo {}.{};; esac'.format(
            asked, pip, *sys.version_info[:2]
        ),
    )
    (programs / "cp").symlink_to(shutil.which("cp"))
    put(
        programs / "python3",
        'case "$*" in\n"-m venv"*) shift 3; mkdir -p "$1/bin"; '
        f"cp {tmp_path / 'python-of-venv'} $1/bin/python;;\n"
        f'*) exec {sys._base_executable} "$@";; esac',
    )
    put(clone / "scripts" / "build_horovod.sh", build)
    return asked


def refusal(done, clone):
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (clone / ".venv").exists()
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("tool", ["g++", "make"])
def test_a_missing_tool_is_named_with_its_package(machine, tool):
    clone, programs = machine
    (programs / tool).unlink()
    line = refusal(start(clone, programs), clone)
    assert f"no {tool} on PATH" in line
    assert "apt-get install g++ make" in line


@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_an_unsupported_python_is_refused(machine, version):
    clone, programs = machine
    put(programs / "python9", f"echo {version}")
    line = refusal(start(clone, programs, PYTHON="python9"), clone)
    assert f"Python {version}" in line
    assert "3.11, 3.12 or 3.13" in line


def test_a_missing_python_is_named(machine):
    clone, programs = machine
    (programs / "python3").unlink()
    assert "no python3 on PATH" in refusal(start(clone, programs), clone)


def test_too_little_disk_is_said_before_anything_is_downloaded(machine):
    clone, programs = machine
    put(programs / "df", "echo Avail; echo 5000")
    line = refusal(start(clone, programs), clone)
    assert "4 GB free" in line
    assert "6 GB are needed" in line


def test_nothing_is_done_when_nothing_changed(machine, tmp_path):
    clone, programs = machine
    asked = stand_in(machine, tmp_path, "true")

    def set_up(**env):
        before = len(asked.read_text().splitlines())
        done = start(clone, programs, **env)
        assert done.returncode == 0, done.stderr
        return asked.read_text().splitlines()[before:], done.stderr

    installs, said = set_up()
    assert "--require-hashes --requirement=requirements.lock" in installs[0]
    assert "requirements-mpi.lock" in installs[0]
    [dev] = [install for install in installs if "requirements-dev.lock" in install]
    assert "--require-hashes --requirement=requirements.lock" in dev  # with one that does not fit it pip refuses
    [wheel] = [install for install in installs if "horovod.whl" in install]
    assert "--editable ." in wheel
    assert set_up() == ([], "")
    other = tmp_path / "another" / "bin"
    other.mkdir(parents=True)
    for tool in ("mpirun", "mpicxx"):  # of an active environment: not the machine's
        put(other / tool, "true")
    assert set_up(PATH=f"{other}:{programs}", VIRTUAL_ENV=str(other.parent)) == ([], "")
    for tool in ("mpirun", "mpicxx"):
        put(programs / tool, "true")
    installs, said = set_up()
    assert "requirements-mpi.lock" not in installs[0]
    assert f"the system's, {programs / 'mpirun'}" in said
    with (clone / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert len(set_up()[0]) == 3
    assert set_up() == ([], "")


def test_mpi_5_has_an_environment_of_its_own(machine, tmp_path):
    """Whatever MPI the machine has; the other environment stays as it is."""
    clone, programs = machine
    asked = stand_in(machine, tmp_path, "true")
    for tool in ("mpirun", "mpicxx"):
        put(programs / tool, "true")
    done = start(clone, programs, MPI="5")
    assert done.returncode == 0, done.stderr
    assert "MPI: Open MPI from requirements-mpi5.lock" in done.stderr
    assert "ready: . .venv-mpi5/bin/activate" in done.stderr
    [install, *_] = asked.read_text().splitlines()
    assert "--require-hashes" in install
    assert "--requirement=requirements-mpi5.lock" in install
    assert "--requirement=requirements-mpi.lock" not in install
    assert not (clone / ".venv").exists()
    assert start(clone, programs, MPI="5").stderr == ""
    before = len(asked.read_text().splitlines())
    assert "the system's" in start(clone, programs).stderr  # without it, .venv
    assert (clone / ".venv" / "setup.stamp").exists()
    assert len(asked.read_text().splitlines()) > before
    assert start(clone, programs, MPI="5").stderr == ""


def test_cuda_12_6_has_an_environment_and_locks_of_its_own(machine, tmp_path):
    clone, programs = machine
    asked = stand_in(machine, tmp_path, "true")
    done = start(clone, programs, CUDA="12.6", MPI="5")
    assert done.returncode == 0, done.stderr
    assert "ready: . .venv-mpi5-cuda12.6/bin/activate" in done.stderr
    first, dev, _ = asked.read_text().splitlines()
    assert "--require-hashes --requirement=requirements-cuda12.6.lock --requirement=requirements-mpi5.lock" in first
    assert dev.endswith("--requirement=requirements-cuda12.6-dev.lock")
    assert start(clone, programs, CUDA="12.6", MPI="5").stderr == ""


@pytest.mark.parametrize("cuda", ["12", "/usr/local/cuda"])
def test_another_cuda_is_refused(machine, cuda):
    clone, programs = machine
    line = refusal(start(clone, programs, CUDA=cuda), clone)
    assert f"CUDA={cuda} cannot be set up: CUDA=12.6 is for V100 and P100" in line
    assert "CUDA_HOME" in line


def only_dev(script):
    """What pip does when it is asked for the packages that Horovod's build does not need."""
    return f'case "$*" in *requirements-dev.lock*) {script};; esac'


def wait_for(file):
    return f"n=0; until [ -e {file} ]; do [ $((n += 1)) -lt 400 ] || exit 1; sleep 0.05; done"


def test_pip_works_beside_the_build(machine, tmp_path):
    """Each waits for the other here."""
    pip, build = tmp_path / "pip", tmp_path / "build"
    stand_in(
        machine,
        tmp_path,
        only_dev(f": >{pip}; {wait_for(build)}"),
        f": >{build}; {wait_for(pip)}; echo horovod.whl",
    )
    done = start(*machine)
    assert done.returncode == 0, done.stderr


def test_pip_ends_its_work_when_the_build_fails(machine, tmp_path):
    failed, ended = tmp_path / "failed", tmp_path / "ended"
    pip = only_dev(f"exec >{os.devnull} 2>&1; {wait_for(failed)}; sleep 0.5; : >{ended}")
    stand_in(machine, tmp_path, pip, f": >{failed}; exit 1")
    done = start(*machine)
    assert done.returncode == 1
    assert ended.exists()
    assert "proof" not in done.stderr
    assert not (machine[0] / ".venv" / "setup.stamp").exists()


def test_pip_that_fails_beside_the_build_fails_the_set_up(machine, tmp_path):
    stand_in(machine, tmp_path, only_dev("exit 1"))
    done = start(*machine)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "setup: pip could not install requirements-dev.lock: its message is above"
    assert not (machine[0] / ".venv" / "setup.stamp").exists()


def test_an_interrupt_leaves_nothing_running(machine, tmp_path):
    pids = tmp_path / "pip", tmp_path / "build"
    pip, build = (f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 60" for pid in pids)
    stand_in(machine, tmp_path, only_dev(pip), build)
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


@pytest.mark.parametrize(
    ("user", "gpus", "settings", "started"),
    [
        (1000, 0, [], "hvdlaunch run -np 2 --"),
        (0, 0, [], "hvdlaunch run -np 2 --allow-run-as-root --"),
        (1000, 1, [], "hvdlaunch run -np 1 --"),
        (1000, 8, [], "hvdlaunch run -np 2 --"),
        (1000, 1, ["NP=4"], "hvdlaunch run -np 4 --"),
    ],
)
def test_make_train_starts_ranks_with_hvdlaunch(machine, user, gpus, settings, started):
    clone, programs = machine
    put(programs / "id", f"echo {user}")
    put(programs / "nvidia-smi", f"for gpu in $(seq {gpus}); do echo GPU $gpu; done")
    (programs / "seq").symlink_to(shutil.which("seq"))
    command = ["make", "--dry-run", "--directory", str(clone), "train", "train-bert", *settings]
    shown = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, check=True).stdout
    for program in ("hvdtrain.effnet", "hvdtrain.bert"):
        assert f"{started} python -m {program}" in " ".join(shown.split())


@pytest.mark.parametrize("version", ["4", "6", "openmpi"])
def test_another_mpi_is_refused(machine, version):
    clone, programs = machine
    line = refusal(start(clone, programs, MPI=version), clone)
    assert f"MPI={version} is no MPI that can be set up: MPI=5 is Open MPI 5" in line
    assert not list(clone.glob(".venv*"))


@pytest.fixture
def builder(machine, tmp_path, tmp_path_factory):
    """build_horovod.sh with a python whose `pip wheel` writes an empty wheel and counts; it looks at torch once."""
    clone, programs = machine
    built, torchs = tmp_path / "built", tmp_path_factory.getbasetemp() / "torchs"
    put(
        programs / "python",
        f'case "$*" in -) [ -e {torchs} ] || {{ {sys.executable} - >{torchs}.$$ && mv {torchs}.$$ {torchs}; }}\n'
        f"exec cat {torchs};;\n"
        f'*"pip wheel"*) echo "$CXX ${{HOROVOD_GPU_OPERATIONS:-none}}" >>{built};\n'
        'while [ -n "$GATE" ] && ! [ -e "$GATE" ]; do sleep 0.1; done\n'
        f'[ -z "$TORCH_SEES" ] || {sys.executable} -c "import gc, os; gc.disable()\n'
        "from torch.utils import cpp_extension as torchs; print(torchs.CUDA_HOME, flush=True)\n"
        'os._exit(0)" >$TORCH_SEES 2>/dev/null\n'
        '[ -z "$CMAKE_HEARS" ] || for words in "/sdist -DX=y" "--build . --config RelWithDebInfo -- VERBOSE=1"; do '
        '"$HOROVOD_CMAKE" $words >>$CMAKE_HEARS; done\n'
        'while [ "$1" != --wheel-dir ]; do shift; done; mkdir -p "$2"; : >"$2/horovod-0-any.whl"; exit;; esac\n'
        f'exec {sys.executable} "$@"',
    )
    for tool in ("mpirun", "mpicxx"):
        (programs / tool).symlink_to(shutil.which(tool))
    put(programs / "mpicxx", "echo g++ -lmpi")

    def build(**env):
        done = start(clone, programs, "build_horovod.sh", str(programs / "python"), **env)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip()), done.stderr, len(built.read_text().splitlines())

    return clone, programs, build


def test_the_wheel_is_built_once_and_taken_from_the_cache_after(builder):
    clone, _, build = builder
    wheel, _, builds = build(CUDA_HOME="/nowhere")
    assert builds == 1
    assert wheel.exists()
    assert wheel.parents[2] == clone / ".cache" / "hvdtrain"
    key = (wheel.parent / "key.txt").read_text()
    for part in ("horovod==", "torch: ", "python: ", "mpi: ", "cuda: ", "build: "):
        assert part in key
    again, _, builds = build(CUDA_HOME="/nowhere")
    assert (again, builds) == (wheel, 1)
    assert [path.name for path in wheel.parents[1].iterdir()] == [wheel.parent.name]


@pytest.mark.parametrize("change", ["cxx17", "horovod_mpi.h", "mpi", "horovod"])
def test_a_changed_key_builds_anew(builder, change):
    clone, programs, build = builder
    first, _, _ = build(CUDA_HOME="/nowhere")
    if (changed := clone / "scripts" / change).exists():
        with changed.open("a") as file:
            file.write("\n")
    elif change == "mpi":
        put(programs / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    else:
        lock = clone / "requirements-horovod.lock"
        lock.write_text(lock.read_text().replace("0.28.1", "0.28.2"))
    second, _, builds = build(CUDA_HOME="/nowhere")
    assert builds == 2
    assert first.parent != second.parent
    assert first.exists()


def test_without_a_toolkit_the_wheel_is_for_cpus_and_the_reason_is_said(builder):
    _, _, build = builder
    _, said, _ = build(CUDA_HOME="/nowhere")
    assert "MPI on CPUs only: no CUDA toolkit" in said
    assert "/nowhere" in said


def test_gpus_without_a_toolkit_are_warned_about(builder):
    _, programs, build = builder
    put(programs / "nvidia-smi", "echo 'GPU 0: NVIDIA H100'")
    _, said, _ = build(CUDA_HOME="/nowhere")
    assert "WARNING: this machine has GPUs" in said


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


def test_a_toolkit_of_another_major_version_is_not_used(builder, tmp_path):
    _, _, build = builder
    _, said, _ = build(CUDA_HOME=str(toolkit(tmp_path / "cuda", "12.4")))
    assert "MPI on CPUs only: CUDA toolkit 12.4" in said


@pytest.mark.parametrize(("home", "release"), [("/nowhere", "13.0"), (None, "12.4")])
def test_a_toolkit_on_path_that_is_not_to_be_used_is_not_seen_by_torch(builder, tmp_path, home, release):
    """Horovod's build asks torch for it, and then wants all of it."""
    _, programs, build = builder
    (programs / "nvcc").symlink_to(toolkit(tmp_path / "cuda", release) / "bin" / "nvcc")
    _, said, _ = build(TORCH_SEES=str(tmp_path / "seen"), **({"CUDA_HOME": home} if home else {}))
    assert "MPI on CPUs only" in said
    assert (tmp_path / "seen").read_text() == "None\n"


def test_a_toolkit_gives_nccl_operations_and_another_wheel(builder, tmp_path):
    _, _, build = builder
    cpu, _, _ = build(CUDA_HOME="/nowhere")
    gpu, said, _ = build(CUDA_HOME=str(toolkit(tmp_path / "cuda", "13.0")))
    assert "NCCL operations on GPUs" in said
    assert cpu.parent != gpu.parent


def test_with_torch_of_cuda_12_6_it_is_for_p100_and_v100(builder, tmp_path):
    _, programs, build = builder
    (programs / "python").rename(programs / "python-of-13")
    facts = "cpython-311\\n2.7.1+cu126\\n12.6\\n2.26.2\\n/nccl"
    put(programs / "python", f'case "$*" in -) printf "{facts}\\n";; *) exec {programs}/python-of-13 "$@";; esac')
    wheel, said, _ = build(CUDA_HOME=str(toolkit(tmp_path / "cuda", "12.6")))
    assert "NCCL operations on GPUs" in said
    assert "cuda: 12.6, NCCL 2.26.2, architectures 60,70,75" in (wheel.parent / "key.txt").read_text()


def test_nothing_is_compiled_that_is_not_linked(builder, tmp_path):
    """Of all targets one is the CUDA kernels once more."""
    _, programs, build = builder
    put(programs / "cmake", 'echo "$@"')
    build(CUDA_HOME="/nowhere", CMAKE_HEARS=str(tmp_path / "heard"))
    configure, compile_ = (tmp_path / "heard").read_text().splitlines()
    assert configure == "/sdist -DX=y"
    assert compile_ == "--build . --target pytorch --config RelWithDebInfo -- VERBOSE=1"


def test_a_failed_build_leaves_no_wheel_and_names_its_log(builder, tmp_path):
    clone, programs, _ = builder
    python = (programs / "python").read_text()
    put(programs / "python", python.partition("\n")[2].replace("exit;; esac", "exit 1;; esac"))
    done = start(clone, programs, "build_horovod.sh", str(programs / "python"), CUDA_HOME="/nowhere")
    assert done.returncode == 1
    assert ".log" in done.stderr
    kept = clone / ".cache" / "hvdtrain" / "horovod"
    assert sorted(path.suffix for path in kept.iterdir()) == [".lock", ".log"]


class Builds:
    """Builds at the same time, each held until the gate opens."""

    def __init__(self, clone, programs, folder):
        self._clone, self._programs, self._folder = clone, programs, folder
        self.gate, self.running = folder / "gate", []

    def start(self, number, stderr=None):
        """One more, whose words come in a file `number`."""
        env = {"PATH": str(self._programs), "HOME": str(self._clone), "CUDA_HOME": "/nowhere", "GATE": str(self.gate)}
        words = [str(self._clone / "scripts" / "build_horovod.sh"), str(self._programs / "python")]
        with (self._folder / f"{number}").open("w") as file, (self._folder / f"{number}.out").open("w") as out:
            self.running.append(subprocess.Popen(words, env=env, stdout=out, stderr=stderr or file))
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


def test_of_three_set_ups_at_once_one_builds_and_the_others_name_it(builder, builds, tmp_path):
    clone, *_ = builder
    first = builds.start(0)
    builds.says(0, "building, two minutes or so")
    for number in (1, 2):
        builds.start(number)
    for number in (1, 2):
        builds.says(number, f"waiting for process {first.pid} on {socket.gethostname()} in {clone}, which builds")
    (status, wheel), *others = builds.wheels()
    assert status == 0
    assert Path(wheel.strip()).exists()
    assert others == [(0, wheel)] * 2
    assert len((tmp_path / "built").read_text().splitlines()) == 1
    assert [path.suffix for path in Path(wheel).parents[1].iterdir()] == [""]


def test_whoever_waits_for_a_builder_that_dies_builds(builds, tmp_path):
    first = builds.start(0)
    builds.says(0, "building, two minutes or so")
    second = builds.start(1)
    builds.says(1, f"waiting for process {first.pid} ")
    first.kill()
    builds.says(1, "building, two minutes or so")
    builds.start(2)
    builds.says(2, f"waiting for process {second.pid} ")
    (_, nothing), (status, wheel), third = builds.wheels()
    assert nothing == ""
    assert status == 0
    assert third == (0, wheel)


def test_the_build_shows_the_elapsed_time(builder, builds, tmp_path):
    """Each second on a terminal, every 30 s in a log; 100 seconds are one here."""
    put(builder[1] / "sleep", f"exec {shutil.which('sleep')} 0.01")
    builds.start(0)
    builds.says(0, "building, 60 s")
    ours, its = os.openpty()
    builds.start(1, stderr=its)
    os.close(its)
    shown = b""
    while b"horovod: waiting, 0:02" not in shown:
        shown += os.read(ours, 1000)
    assert b"horovod: waiting, 0:01\rhorovod: waiting, 0:02" in shown
    builds.running[0].kill()
    while b"horovod: building, 1:02" not in shown:
        shown += os.read(ours, 1000)
    assert b"horovod: building, 1:01\rhorovod: building, 1:02" in shown
    assert [status for status, _ in builds.wheels()[1:]] == [0]
    said = (tmp_path / "0").read_text()
    assert [line for line in said.splitlines() if "building, " in line][1:3] == [
        "horovod: building, 30 s",
        "horovod: building, 60 s",
    ]
    os.close(ours)


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
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "check_mpi.py")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "/opt/for-mpi4py/libmpi.so" in done.stderr
    assert "/opt/for-horovod/libmpi.so" in done.stderr


def test_the_compiler_wrapper_changes_horovods_own_files_only(machine):
    """nvcc gives the wrapper what it has preprocessed: another header in front of that is an error."""
    clone, programs = machine
    put(programs / "g++", 'echo "$@"')
    own, nvccs = (start(clone, programs, "cxx17", flag, "a.cc").stdout for flag in ("-std=c++14", "-std=c++17"))
    assert own.endswith(" -std=c++17 -include stdexcept a.cc\n")
    assert nvccs.endswith("/../../../.. -std=c++17 a.cc\n")


def test_the_compiler_wrapper_leaves_debug_information_out_and_keeps_the_optimization(machine):
    clone, programs = machine
    put(programs / "g++", 'echo "$@"')
    said = start(clone, programs, "cxx17", "-O3", "-g", "-DNDEBUG", "a.cc").stdout
    assert said.endswith("/../../../.. -O3 -DNDEBUG a.cc\n")


@pytest.mark.parametrize("name", ["mpi_controller", "mpi_context"])
def test_two_files_of_horovods_call_mpi_as_the_loss_of_a_rank_needs_it(machine, name):
    clone, programs = machine
    put(programs / "g++", 'echo "$@"')
    words = start(clone, programs, "cxx17", "-c", f"horovod/common/mpi/{name}.cc").stdout.split()
    assert words[-4:-1] == ["-c", "-include", str(clone / "scripts/horovod_mpi.h")]
    assert "-include" not in start(clone, programs, "cxx17", "-c", "horovod/common/operations.cc").stdout
