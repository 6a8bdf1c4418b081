import io
import json
import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.cli import main as cli
from launch.cli import show, start
from launch.cli.options import parser
from launch.errors import HostError
from launch.machine import local
from launch.run.restart import restarts
from launch.run.start import prepare
from launch.run.supervise import run
from launch.run.supervise.stops import Stops
from tests.unit.cli.commands import ended, output, refusal
from tests.unit.machines import PIX4, machine

PLAN = ("plan", "-np", "2", "--topology", "a=pix4.txt")
PROGRAM = ("--", "prog")
HOSTFILE = ("hostfile", "-H")
TOPO = ("topo", "--topology", "pix4.txt")
GPUS = ("gpus", "--topology", "pix4.txt", "-k", "2")
SBATCH = ("run", "-np", "2", "--batch", "job")
JOB = ("run", "-np", "4", "--batch", "job.yaml", "--batch-option", "image=a", "--batch-option", "claim=b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("topo\nx",), "invalid choice: 'topo\\nx'"),
        (("--topo",), "no command: put run first; unrecognized arguments: --topo; see hvdlaunch run --help"),
        (("topo", "a\x1b[2Jb"), "unrecognized arguments: a\\x1b[2Jb; see hvdlaunch topo --help"),
        ((*TOPO, "--js"), "unrecognized arguments: --js"),
        (("run", "-np", "2", "--restarts", "-1", *PROGRAM), "--restarts -1: pass a number of at least 0"),
        (("run", "-np", "2", "--restarts", "1", "--min-np", "3", *PROGRAM), "from 1 to -np, which is 2"),
        (("run", "-np", "2", "--grace-s", "inf", *PROGRAM), "--grace-s inf: pass a number of seconds, at least 0"),
        (("run", *PLAN[1:], *PROGRAM), "--topology requires hvdlaunch plan or --batch FILE.sh"),
        ((*TOPO, "--pair", "0,1,2"), "--pair takes two GPUs, as in 0,1"),
        ((*TOPO, "--pair", "0,0"), "'0,0' is not a list of GPU indices, each once, as in 0,3"),
        ((*TOPO, "--pair", "0,9"), "unknown GPU 9; its GPUs are 0-3"),
        ((*TOPO, "--picture", "out.png"), "out.png: a picture's name ends in .svg"),
        (("topo", "--gpu-name", "A100"), "--gpu-name is for a saved text"),
        (("topo", "--topology", "missing"), "missing cannot be read: No such file or directory"),
        (("topo", "--topology", "binary"), "binary cannot be read: it is not text"),
        (("topo", "--topology", "/dev/zero"), "/dev/zero cannot be read: it is a device: pass a file"),
        ((*GPUS, "--gpus", "1,7"), "pix4.txt: unknown GPU 7; its GPUs are 0-3"),
        (("gpus", "--topology", "cpu.json", "-k", "1"), "no GPU found on this host"),
        (("hostfile",), "one of the arguments -H --hostfile is required"),
        ((*HOSTFILE, "a", "-o", "missing/hosts"), "missing/hosts cannot be written: No such file or directory"),
        (PLAN, "no program: put it after --"),
        ((*PLAN, "-H", "b:2", *PROGRAM), "no saved topology of b: add --topology b=FILE, or"),
        ((*PLAN, "--gpus", "0,\u0663", *PROGRAM), "argument --gpus: '0,\u0663' is not a list"),
        ((*PLAN, "--topology", "a=x", *PROGRAM), "--topology 'a=x': a has one already: name each host once"),
        ((*PLAN, "--topology", "a,b=pix4.txt", *PROGRAM), "--topology 'a,b=pix4.txt': pass HOST=FILE"),
        ((*PLAN, "--apptainer", "missing.sif", *PROGRAM), "--apptainer missing.sif: no such image"),
        ((*PLAN, "--apptainer=--writable-tmpfs", *PROGRAM), "argument --apptainer: '--writable-tmpfs' is not an image"),
        ((*PLAN, "--ssh-option", "Port=$(x)", *PROGRAM), "argument --ssh-option: 'Port=$(x)' is not KEY=VALUE without"),
        ((*PLAN, "--silence-s", "0", *PROGRAM), "argument --silence-s: '0' is not a number of seconds from 1 to 86400"),
        (("check", *PROGRAM), "check takes no program: leave out what stands after --"),
        ((*SBATCH, "--hostfile", "-", *PROGRAM), "--hostfile - does not work with --batch FILE.sh"),
        ((*SBATCH, "-H", "n1:1", *PROGRAM), "-np 2 exceeds the 1 available slots"),
        ((*SBATCH, "--batch-option", "ntasks=1", *PROGRAM), "-np 2 exceeds the 1 available slots"),
        (
            ("run", "-np", "2", "--dry-run", *PROGRAM),
            "--dry-run is gone: hvdlaunch plan shows what hvdlaunch run would",
        ),
        (("run", "-np", "2", "--elastic", *PROGRAM), "--elastic is gone: --restarts N starts all ranks again"),
        (("run", "-np", "2", "--grow", *PROGRAM), "--grow is gone: with --restarts N a host that is back joins"),
        (("estimate", "--recovery-s", "1"), "--recovery-s is gone: --restart-s is the time of a loss"),
        (
            (*GPUS, "--driver-timeout-s", "60"),
            "--driver-timeout-s is gone: leave it out: to keep the GPU driver loaded",
        ),
        ((*GPUS, "--measured", "pix4.txt"), "pix4.txt: it is not from hvdlaunch"),
        (("check", "--bandwidth", "--apptainer", "a.sif"), "--bandwidth measures with the project"),
        ((*JOB, "-H", "a:4", *PROGRAM), "-H does not work with --batch FILE.yaml"),
        (("run", "-np", "0", *PROGRAM), "argument -np: '0' is not a positive integer; see hvdlaunch run --help"),
        ((*PLAN, "-H", "a:2", "--per-host", "4", *PROGRAM), "--per-host 4 is more than the 2 slots of host a"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, folder, words, message):
    before = sorted(folder.rglob("*"))
    assert message in refusal(capsys, *words)
    assert sorted(folder.rglob("*")) == before


STARTS = [(), TOPO, GPUS, HOSTFILE, ("hostfile", "--hostfile"), PLAN, (*PLAN, *PROGRAM), ("plan", "-np"), ("fly",)]
OPTIONS = "-k -np -H --gpus --topology -x -- --pair --per-host --json --gpu-name --format --hostfile"
VALUES = "pix4.txt cpu.json binary b=pix4.txt a:2 1 2 0,1 none n[1-2] A100 NCCL_DEBUG rankfile cores hosts MY_TOKEN"
WORDS = st.sampled_from([*OPTIONS.split(), *VALUES.split()]) | st.text(st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.sampled_from(STARTS), words=st.lists(WORDS, max_size=6))
def test_any_words_end_in_an_answer_or_in_one_line(capsys, monkeypatch, start, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    status, out, err = ended(capsys, *start, *words)
    assert status in (0, 2)
    assert "s3cret!" not in out + err
    if status:
        assert out == ""
        assert err.startswith("hvdlaunch: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
    else:
        assert out
        assert err == "" or ("--gpu-name" in words and err.startswith("hvdlaunch: note: "))


def test_topo_shows_the_matrix_a_pair_and_a_picture(capsys, folder):
    lines = output(capsys, *TOPO).splitlines()
    assert lines[0] == "4 GPUs (pix4.txt)"
    assert ["GPU0", "X", "SYS", "PIX", "PIX"] in [line.split() for line in lines]
    access = output(capsys, "topo", "--topology", "p2p.txt")
    assert access.startswith("May these GPUs copy straight to each other? (p2p.txt)")
    assert "24 GB/s one way. GPU 2 is at" in output(capsys, *TOPO, "--gpu-name", "A100", "--pair", "2,0")
    assert output(capsys, *TOPO, "--picture", "out.svg") == ""
    assert (folder / "out.svg").read_text().startswith("<")


def test_topo_as_json_is_read_back(capsys, folder, monkeypatch):
    text = output(capsys, *TOPO, "--json")
    (folder / "saved.json").write_text(text)
    assert output(capsys, "topo", "--topology", "saved.json", "--json") == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PIX4.encode())))
    read = json.loads(output(capsys, "topo", "--topology", "-", "--json"))
    assert read == {**json.loads(text), "source": "standard input"}


def test_gpus_and_plan_choose_by_what_was_measured(capsys):
    out = output(capsys, *GPUS, "--measured", "m.json")
    assert out.startswith("GPUs 0,1, ring 0-1, 30 GB/s\n")
    assert "slowest link of the ring SYS (30 GB/s measured)" in out
    out = output(capsys, *PLAN, "--measured", "m.json", *PROGRAM)
    assert [line.split()[3] for line in out.splitlines()[1:3]] == ["0", "1"]


def test_an_unknown_model_is_noted_once_and_costs_its_speeds_alone(capsys):
    for command, shown in ((TOPO, "4 GPUs (pix4.txt)"), (GPUS, "GPUs 0,2, ring 0-2\n")):
        status, out, err = ended(capsys, *command, "--gpu-name", "Z1")
        assert status == 0
        assert out.startswith(shown)
        assert err.startswith("hvdlaunch: note: Z1 (GPU 0 of this host, ")
        assert err.count("\n") == err.count("Z1") == 1


def test_without_a_file_this_host_is_asked_and_the_users_own_choice_respected(capsys, monkeypatch):
    monkeypatch.setattr(local, "local_topology", lambda **_: machine())
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "1,3")
    assert output(capsys, "gpus", "-k", "2").startswith("GPUs 1,3, ring 1-3\n")
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    line = "no GPU found on this host: pass a saved topology with --topology FILE"
    assert refusal(capsys, "gpus", "-k", "2") == line


def test_gpus_as_json(capsys):
    answer = json.loads(output(capsys, "gpus", "--topology", "pix4.txt", "-k", "4", "--json"))
    assert (answer["gpus"], answer["ring"]) == ([0, 1, 2, 3], [0, 2, 1, 3])
    assert (answer["runner_up"], answer["worst"], answer["bandwidth_gbps"]) == (None, None, None)
    answer = json.loads(output(capsys, *GPUS, "--gpus", "1-3", "--json", "--gpu-name", "A100"))
    assert (answer["gpus"], answer["runner_up"], answer["worst"]) == ([1, 2], [1, 3], [2, 3])
    assert answer["bandwidth_gbps"] == 24.0


def test_hostfile_writes_every_spelling(capsys, folder):
    for words, text in {
        "-H a:2,b --format mpich": "a:2\nb:1\n",
        "--hostfile hosts --format rankfile": "rank 0=a slot=0\nrank 1=a slot=1\nrank 2=b slot=0\n",
        "-H n[01-02]:4 --format horovod": "n01 slots=4\nn02 slots=4\n",
    }.items():
        assert output(capsys, "hostfile", *words.split()) == text
        assert output(capsys, "hostfile", *words.split(), "-o", "out") == ""
        assert (folder / "out").read_text() == text


def test_a_link_is_written_through_and_what_is_no_file_is_not_replaced(capsys, tmp_path):
    (tmp_path / "link").symlink_to("hosts")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "pipe"):
        assert ended(capsys, "hostfile", "-H", "a:4", "-o", str(tmp_path / name)) == (0, "", "")
    assert (tmp_path / "link").is_symlink()
    assert os.read(reader, 100).decode() == (tmp_path / "hosts").read_text() == "a slots=4\n"
    os.close(reader)


def test_sbatch_writes_a_script_that_runs_the_same_again(capsys, folder):
    words = [*("run", "-np", "4", "-H", "n1:2,n2:2", "--batch", "my job", "--batch-option", "time=4:00:00"), "-x"]
    words += ["NCCL_DEBUG", "--", "/bin/my prog", "--batch", "x"]
    for spelled in (words, [*words[:5], "--batch=my job", "--batch-option=time=4:00:00", *words[9:]]):
        assert output(capsys, *spelled) == "submit it with: sbatch 'my job'\n"
        *head, path, change, _, start = Path("my job").read_text().splitlines()
        assert {"#SBATCH --job-name=my_prog", "#SBATCH --nodelist=n1,n2", "#SBATCH --time=4:00:00"} <= {*head}
        assert {"#SBATCH --cpus-per-task=4", "#SBATCH --signal=B:USR1@35"} <= {*head}
        assert (path, change) == (f"export PATH={folder / 'bin'}", f"cd {folder} || exit 2")
        kept = ["-np", "4", "-H", "n1:2,n2:2", "-x", "NCCL_DEBUG", "--", "/bin/my prog", "--batch", "x"]
        assert shlex.split(start) == ["exec", sys.executable, "-P", "-m", "launch", "run", *kept]


def test_with_the_nodes_topology_sbatch_asks_for_its_cores_and_checks_its_gpus(capsys):
    sbatch = ("run", "-np", "2", "--batch", "job", *PLAN[3:])
    output(capsys, *sbatch, *PROGRAM)
    script = Path("job").read_text()
    assert "#SBATCH --cpus-per-task=8\n" in script  # of 16 cores
    assert "--topology" not in script
    assert "host a has no GPU 4" in ended(capsys, *sbatch, "--gpus", "0,4", *PROGRAM)[2]


def _request_of(*words):
    options = parser().parse_args(["run", "-np", "2", *words])
    options.program = ["prog"]
    return start._request(options)


def test_hosts_are_reached_as_options_and_open_mpis_variable_say(monkeypatch):
    monkeypatch.setitem(os.environ, "OMPI_MCA_plm_rsh_agent", "/bin/enter -q")
    options = "--ssh-option Port=2222 --ssh-option User=me --silence-s 4 --network ib0"
    plain, ours = (_request_of(*words) for words in ((), (*options.split(), "--ranks-per-replica", "2")))
    assert (plain.ssh.options, plain.ssh.silence_s) == ((), 30)
    assert ours.ssh.agent == ("/bin/enter", "-q")
    assert (ours.ssh.options, ours.ssh.silence_s) == (("Port=2222", "User=me"), 4)
    assert (ours.network, ours.ranks_per_replica) == ("ib0", 2)


def test_what_others_said_stands_below_the_line(capsys, monkeypatch):
    refusal_of_ssh = HostError("host h2: no\x1b[2J\n way", ["Welcome \x1b[31m", "", "Permission denied"])
    monkeypatch.setattr(prepare, "prepare", Mock(side_effect=refusal_of_ssh))
    below = "    Welcome \\x1b[31m\n\n    Permission denied\n"
    assert ended(capsys, "run", "-np", "1", *PROGRAM) == (2, "", f"hvdlaunch: error: host h2: no\\x1b[2J way\n{below}")


def test_a_run_ends_with_its_status(capsys, monkeypatch):
    prepared = SimpleNamespace(plan=SimpleNamespace(remarks=("be warned",)))
    monkeypatch.setattr(prepare, "prepare", lambda *_: prepared)
    monkeypatch.setattr(start, "journal", kept := Mock(alone=nullcontext))
    monkeypatch.setattr(start, "require_notices", heard := Mock())
    ends = run.RunResult(status=7, run_folder=None, why="x", stopped=False)
    runs = []
    monkeypatch.setattr(run, "run", lambda prepared, *, grace_s: runs.append((prepared, grace_s)) or ends)
    assert ended(capsys, "run", "-np", "1", *PROGRAM) == (7, "", "hvdlaunch: be warned\n")
    assert ended(capsys, "run", "-np", "1", "--grace-s", "90", *PROGRAM) == (7, "", "hvdlaunch: be warned\n")
    assert runs == [(prepared, 25), (prepared, 90)]
    assert heard.mock_calls == [call(prepared)] * 2
    assert kept.mock_calls == [call.begin(prepared), call.end(prepared, ends)] * 2


def test_a_run_that_is_started_again_reads_its_hostfile_each_time(capsys, monkeypatch):
    def supervised(read, again, environment):
        assert again == restarts.RestartPolicy(restarts=5, min_np=2, grace_s=25)
        assert environment is os.environ
        for slots in (1, 7):
            Path("hosts").write_text(f"a slots={slots}\n")
            assert [(host.name, host.slots) for host in read().hosts] == [("a", slots)]
        return 7

    monkeypatch.setattr(restarts, "run_with_restarts", supervised)
    Path("hosts").write_text("b\n")
    again = ("run", "-np", "4", "--restarts", "5", "--min-np", "2")
    assert ended(capsys, *again, "--hostfile", "hosts", *PROGRAM) == (7, "", "")


def test_a_hostfile_on_standard_input_is_read_once(capsys, monkeypatch):
    def supervised(read, again, _):
        assert again.min_np is None  # as many as at first
        return sum(host.slots for _ in range(3) for host in read().hosts)

    monkeypatch.setattr(restarts, "run_with_restarts", supervised)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a slots=4\n")))
    assert ended(capsys, "run", "-np", "4", "--restarts", "1", "--hostfile", "-", *PROGRAM)[0] == 12
    reader, writer = os.pipe()
    os.write(writer, b"a slots=4\n")
    os.close(writer)
    assert ended(capsys, "run", "-np", "4", "--restarts", "1", "--hostfile", f"/dev/fd/{reader}", *PROGRAM)[0] == 12
    os.close(reader)


def test_a_file_that_fails_is_named_and_no_stream_is_blamed(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_do", Mock(side_effect=PermissionError(13, "Permission denied", "/proc/\n1")))
    assert ended(capsys, "topo") == (1, "", "hvdlaunch: error: /proc/\\n1: Permission denied\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BrokenPipeError(32, "Broken pipe"), ""),
        (OSError(28, "No space left on device"), "standard output cannot be written: No space left on device"),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_error_and_a_full_disk_is(capfd, monkeypatch, error, line):
    monkeypatch.setattr(cli, "_do", Mock(side_effect=error))
    monkeypatch.setattr(cli.os, "dup2", lambda *_: None)  # standard output is pytest's
    assert ended(capfd, "topo") == (1, "", line and f"hvdlaunch: error: {line}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["a job in the background", "nohup"])
def test_an_ignored_signal_stays_ignored(capsys, monkeypatch, number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        monkeypatch.setattr(show, "gpus", lambda _: signal.raise_signal(number) or 7)
        assert ended(capsys, *GPUS) == (7, "", "")
        with Stops(grace_s=1) as stops:
            signal.raise_signal(number)
            assert not stops.again()
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_folder_that_is_gone_is_told_before_anything_starts(capsys, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "cd to one that exists" in refusal(capsys, "plan", "-np", "1", *PROGRAM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_while_nothing_runs_ends_it(capsys, monkeypatch, number):
    monkeypatch.setattr(start, "run", lambda _: signal.raise_signal(number))
    assert ended(capsys, "run", "-np", "1", *PROGRAM) == (128 + number, "", "")


def test_gpus_that_are_busy_are_chosen_last_and_only_where_they_are_named(capsys, monkeypatch):
    monkeypatch.setattr(local, "local_topology", lambda **_: machine(unusable={0: "busy: pid 7"}))
    assert output(capsys, "gpus", "-k", "2", "--gpus", "0-2").startswith("GPUs 1,2, ring 1-2\n")
    lines = output(capsys, "gpus", "-k", "2", "--gpus", "0,2").splitlines()
    assert (lines[0], lines[2]) == ("GPUs 0,2, ring 0-2", "GPU 0: busy: pid 7, chosen because --gpus names it")
    assert "GPU 0: busy: pid 7" in ended(capsys, "gpus", "-k", "4")[2]


@pytest.mark.parametrize("start", ["run -np 2 --batch job", "sweep -np 1,2"])
def test_what_starts_ranks_of_its_own_is_refused_inside_ranks(capsys, folder, start):
    for program in (
        "torchrun --nproc_per_node 2 x.py",
        "/usr/bin/mpiexec -n 2 x",
        "python3.11 -m torch.distributed.run x",
    ):
        line = refusal(capsys, *start.split(), "--", *program.split())
        assert "each rank would start ranks of its own: leave " in line
    assert not (folder / "job").exists()


@pytest.mark.parametrize("program", ["python torchrun.py", "python -m train.mpirun", "python -m", "./x.py"])
def test_a_program_that_only_looks_alike_is_none(capsys, folder, program):
    (folder / "x.py").touch(mode=0o755)
    assert "mpirun" in output(capsys, *PLAN, "--", *program.split())


def test_words_of_the_program_are_its_own(capsys):
    assert "--hosts" in output(capsys, *PLAN, "--", "prog", "--hosts", "-np", "0", "--busy")
    assert "prog --hosts" in refusal(capsys, "run", "--nsys", "-np", "2", "prog", "--hosts", "x")
