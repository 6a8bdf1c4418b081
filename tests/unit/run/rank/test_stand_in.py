"""Programs behind the two processes that stand for them: as forks of a keeper, and by themselves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.process import stat
from launch.run.rank import keeper, stand_in
from tests.unit.run.supervise.test_process import has_ended
from tests.unit.run.supervise.test_screen import until

PROJECT = Path(__file__).parents[4]
STAND = """
import os, sys
from launch.run.rank import stand_in
launcher = stand_in.become_guard()
more = {"in_session": "IN_SESSION" in os.environ}
stand_in.start(sys.executable, ["python", *sys.argv[1:]], launcher, 2, os.environ["KEEPER"], **more)
os.execv(sys.executable, ["python", *sys.argv[1:]])
"""
WAIT_S = 30


class Host:
    """A host with a keeper that has imported wave or is about to; programs are files of a folder."""

    def __init__(self, folder):
        self.folder, self.report, self.name = folder, f"{folder}/report.json", f"test-{os.urandom(8).hex()}"
        self.started = []
        self.env = {**os.environ, "HVDLAUNCH_REPORT": self.report, "KEEPER": self.name, "RANK": "0"}
        self.env |= {"PYTHONPATH": f"{PROJECT}:{folder}", "PYTHONUNBUFFERED": "1"}

    def keep(self, modules="json late wave"):
        (self.folder / "late.py").write_text("import os, time\ntime.sleep(0.1)\nos.environ['KMP_LATE'] = 'TRUE'")
        (self.folder / "busy.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9]).start()"
        )
        with subprocess.Popen(["sleep", "100"], env=self.env) as rank:
            words = [sys.executable, keeper.__file__, self.report, self.name]
            self.keeper = subprocess.Popen(words, stdin=subprocess.PIPE, cwd="/", env=os.environ)
            self.keeper.stdin.write(f"{modules}\n".encode())
            self.keeper.stdin.flush()
            while self.keeper.poll() is None and self.name not in Path("/proc/net/unix").read_text():
                time.sleep(0.01)
            rank.kill()

    def start(self, text, *words, **env):
        (self.folder / "program.py").write_text(text)
        command = [sys.executable, "-c", STAND, "program.py", *words]
        files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env=self.env | env, **files))
        return self.started[-1]

    def first_line(self, process):
        return json.loads(process.stdout.readline())

    def end(self):
        self.keeper.kill()
        self.keeper.wait()
        self.keeper.stdin.close()
        for process in self.started:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path)
    made.keep()
    yield made
    made.end()


COLD = {"KEEPER": ""}
ABOUT = """
import json, os, resource, sys
status = open("/proc/self/status").read().splitlines()
marks = ("HVDLAUNCH_REPORT=", "RANK=")
mine = [mark for mark in open("/proc/self/environ").read().split(chr(0)) if mark.startswith(marks)]
about = {
    "signals": [line for line in status if line.startswith("Sig")],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "environment": {name: value for name, value in os.environ.items() if name != "KEEPER"},
    "files": [os.readlink(f"/proc/self/fd/{file}") for file in ("0", "2")],
    "folder": [os.umask(0), os.getcwd()],
    "shown": [open("/proc/self/cmdline").read()[:-1].replace(chr(0), " "), sorted(mine)],
    "main": [__name__, __file__, sys.argv, sys.orig_argv, sys.path, list(sys.flags), sys.executable],
    "process": [open("/proc/self/oom_score_adj").read(), sorted(os.sched_getaffinity(0)), os.getpid() == os.getpgid(0)],
    "session": os.getpid() == os.getsid(0),
}
print(json.dumps([about, "wave" in sys.modules, len(os.listdir("/proc/self/fd"))]))
"""


@pytest.mark.parametrize("session", [{}, {"IN_SESSION": "yes"}])
def test_a_fork_is_what_the_program_would_be_that_starts_by_itself(host, tmp_path, session):
    """But for its lifeline, and what it has imported."""
    found = {}
    for name, env in (("fork", {}), ("cold", COLD)):
        limited = f'umask 027; ulimit -n 512; ulimit -c 0; cd {tmp_path}; exec taskset -c 0 "$@" 2>/dev/null'
        (tmp_path / "program.py").write_text(ABOUT)
        command = ["sh", "-c", limited, "sh", sys.executable, "-c", STAND, "program.py", "--x", "1"]
        done = subprocess.run(
            command, env=host.env | env | session, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        found[name] = json.loads(done.stdout)
    (fork, *is_warm), (cold, *is_cold) = found["fork"], found["cold"]
    assert fork["environment"].pop("KMP_LATE") == "TRUE"  # set by an import
    assert fork == cold
    assert (fork["process"][-1], fork["session"]) == (True, bool(session))
    assert (is_warm, is_cold) == ([True, 5], [False, 4])


SAYS = "import json, os, signal, sys, time; print(json.dumps([os.getpid(), 'wave' in sys.modules]), flush=True)\n"
ENDS = [("sys.exit(3)", 3), ("os._exit(4)", 4), ("pass", 0), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", -9)]
ENDS += [("os.kill(os.getpid(), 11)", -11), ("sys.exit('why')", 1)]


@pytest.mark.parametrize(("end", "status"), ENDS)
def test_a_program_ends_as_it_would_also_if_its_keeper_is_killed(host, end, status):
    for killed in (False, True):
        waits = f"while os.getppid() == {host.keeper.pid}: time.sleep(0.01)\n" if killed else ""
        running = host.start(f"{SAYS}{waits}{end}")
        assert host.first_line(running)[1]
        if killed:
            host.keeper.kill()
        assert running.wait(WAIT_S) == (status if status >= 0 or not killed else -9)


def stop(host):
    os.kill(host.keeper.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("change", "env"),
    [
        *((lambda _: None, env) for env in ({"OMP_NUM_THREADS": "7"}, {"LD_X": "1"}, {"PYTHONHASHSEED": "1"}, COLD)),
        (stop, {}),
        (lambda host: host.keeper.kill(), {}),
        *((lambda host, name=name: (host.end(), host.keep(f"json wave {name}")), {}) for name in ("missing", "busy")),
    ],
)
def test_on_any_doubt_a_program_starts_by_itself(host, change, env):
    change(host)
    running = host.start(SAYS, **env)
    assert host.first_line(running)[1] is False
    assert running.wait(WAIT_S) == 0


def test_a_keeper_without_forks_takes_another_environment(host):
    """A study goes on with another number of threads."""
    assert host.first_line(host.start(SAYS, OMP_NUM_THREADS="7"))[1] is False
    until(lambda: host.first_line(host.start(SAYS, OMP_NUM_THREADS="7"))[1])


TIME = "import os, signal, time\n"
DEAF = f"{TIME}signal.signal(15, lambda *_: print('asked', flush=True))\n{SAYS}while True: time.sleep(1)"
LAST = "signal.signal(15, lambda *_: (time.sleep(0.3), print('last words', flush=True), os._exit(0)))"
WORDS = f"{TIME}{LAST}\n{SAYS}time.sleep(99)"


@pytest.mark.parametrize("env", [{}, COLD])
@pytest.mark.parametrize(("program", "said"), [(WORDS, "last words\n"), (DEAF, "asked\n")])
def test_a_program_has_a_moment_for_its_last_words(host, program, said, env):
    running = host.start(program, **env)
    pid, _ = host.first_line(running)
    running.kill()
    assert running.stdout.read() == said  # to the end of the stream
    assert has_ended(pid)


LEAVES = f"""{SAYS}import subprocess
for env in ({{}}, {{"HVDLAUNCH_RANK": "1"}}):
    print(subprocess.Popen(["sleep", "30"], env=env, stdout=subprocess.DEVNULL).pid, flush=True)
"""


@pytest.mark.parametrize("session", [{}, {"IN_SESSION": "yes"}])
@pytest.mark.parametrize("env", [{}, COLD])
def test_a_process_without_the_environment_ends_with_its_rank(host, env, session):
    """hvdlaunch finds the other one by its environment."""
    running = host.start(LEAVES, **session, **env)
    host.first_line(running)
    unmarked, marked = map(int, running.stdout)
    assert running.wait(WAIT_S) == 0
    assert has_ended(unmarked)
    assert stat(marked) is not None
    os.kill(marked, signal.SIGKILL)


@pytest.mark.parametrize(
    ("start", "job", "variables"),
    [
        ("vader", "ab0001", {"OMPI_MCA_ess_base_jobid": str(0xAB0001)}),
        ("sm", "c0f10001", {"PMIX_NAMESPACE": "prterun-vm-25281@1"}),  # pairs seen with Open MPI 5.0.11
        ("sm", "ee750001", {"PMIX_NAMESPACE": "prterun-vm-25290@1"}),
    ],
)
def test_the_memory_that_a_killed_mpirun_leaves_is_removed(start, job, variables, tmp_path, monkeypatch):
    monkeypatch.setattr(stand_in, "SHARED_MEMORY", str(tmp_path))
    own, *others = (
        f"{start}_segment.h1.{{}}.{job}.1",
        f"{start}_segment.h1.{{}}.{job}.11",
        f"{start}_segment.h1.{{}}.b0001.1",
        f"x.{{}}.{job}.1",
    )
    for name in (own, *others):
        (tmp_path / name.format(os.geteuid())).touch()
    stand_in.remove_segment({**variables, "OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    stand_in.remove_segment({})
    assert {path.name for path in tmp_path.iterdir()} == {name.format(os.geteuid()) for name in others}


@pytest.mark.parametrize("env", [{}, COLD])
def test_signals_reach_the_program_once_and_it_dies_with_its_guard(host, env):
    running = host.start(DEAF, **env)
    pid, _ = host.first_line(running)
    time.sleep(0.1)
    running.terminate()
    assert running.stdout.readline() == "asked\n"
    guard = int(subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, check=True).stdout)
    os.kill(guard, signal.SIGKILL)
    assert running.wait(WAIT_S) == -9
    assert (has_ended(pid), running.stdout.read()) == (True, "")
