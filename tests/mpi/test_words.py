"""What ranks write: kept on disk whatever happens, seen of rank 0 or line by line of all; no rank notices."""

import json
import subprocess
import sys

import pytest

from tests.mpi.launched import argv, environment, finished, lines

SAYS = 'echo "out $OMPI_COMM_WORLD_RANK"; echo "err $OMPI_COMM_WORLD_RANK" >&2'
RANK = "import json, os, signal, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"


def python(script):
    return [sys.executable, "-c", RANK + script]


def log(folder, rank, name="mine"):
    return folder / "logs" / name / f"rank-{rank}.log"


def test_rank_0_is_seen_and_all_are_kept(tmp_path):
    done = finished(tmp_path, argv(program=["sh", "-c", SAYS]), HVDLAUNCH_JOB="mine")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out 0\n"
    assert lines(done) == ["out 0", "err 0"]
    assert [sorted(log(tmp_path, rank).read_text().splitlines()) for rank in (0, 1)] == [
        [f"err {rank}", f"out {rank}"] for rank in (0, 1)
    ]


BURSTS = (
    "lines = [f'{rank} {number} ' + 'x' * (7 * number % 3000) for number in range(400)]\n"
    "for part in range(0, 400, 40):\n"
    "    for stream in (sys.stdout, sys.stderr):\n"
    "        burst = ''.join(f'{stream.name} {one}\\n' for one in lines[part:part + 40])\n"
    "        os.write(stream.fileno(), burst.encode())\n"
)


def all_whole(found, ranks):
    """Of BURSTS, which are longer than what mpirun reads at once, every line is there, and nothing else."""
    for rank in range(ranks):
        for stream in ("<stdout>", "<stderr>"):
            begins = f"[{rank}] {stream} {rank} "
            expected = [f"{begins}{number} " + "x" * (7 * number % 3000) for number in range(400)]
            assert [line for line in found if line.startswith(begins)] == expected
    assert len(found) == 800 * ranks


def test_all_are_seen_on_request_and_no_line_mixes_with_another(tmp_path):
    done = finished(tmp_path, argv("--show", "all", "-np", "3", program=python(BURSTS)))
    assert done.returncode == 0, done.stderr
    for stream, other in ((done.stdout, "<stderr>"), (done.stderr, "<stdout>")):
        assert stream
        assert other not in stream
    all_whole(lines(done), ranks=3)


def test_the_last_words_of_a_rank_are_shown_whatever_the_program(tmp_path):
    """It flushes nothing itself."""
    script = "if rank == 0:\n    time.sleep(100)\nprint('\\x1b[31mword')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = finished(tmp_path, argv(program=python(script)), HVDLAUNCH_JOB="mine", PYTHONUNBUFFERED="")
    assert done.returncode == 137, done.stderr
    first, *words, file = lines(done)
    killed = "died of signal 9 (Killed), perhaps out of memory"
    assert first == f"hvdlaunch: error: rank 1 on localhost {killed}; its last words:"
    assert r"    \x1b[31mword" in words
    assert file == f"    {log(tmp_path, 1)}"
    assert "\x1b[31mword\n" in log(tmp_path, 1).read_text()


def test_what_a_rank_has_started_keeps_nobody_waiting(tmp_path):
    """It inherits the rank's streams, and mpirun waits for their end."""
    done = finished(tmp_path, argv(program=["sh", "-c", "sleep 300 & setsid sleep 300 & exit 0"]))
    assert (done.returncode, lines(done)) == (0, [])


FACTS = (
    "status = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines())\n"
    "try:\n    os.waitpid(-1, 0)\nexcept ChildProcessError:\n    children = 0\n"
    "facts = {'terminals': [os.isatty(number) for number in (0, 1, 2)], 'children': children,\n"
    "    'ignored': status['SigIgn'], 'caught': status['SigCgt'], 'leads': os.getpgid(0) == os.getpid(),\n"
    "    'parent': os.path.basename(open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')[0]),\n"
    "    'files': len(os.listdir('/proc/self/fd'))}\n"
    "json.dump(facts, open(f'{sys.argv[1]}-{rank}', 'w'))\n"
)


@pytest.mark.slow
def test_a_rank_finds_itself_as_under_mpirun_alone(tmp_path):
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    alone = ["mpirun", "--oversubscribe", "-np", "2", *python(FACTS), "alone"]
    subprocess.run(alone, cwd=tmp_path, env=environment(tmp_path, **own), stdin=subprocess.DEVNULL, check=True)
    assert finished(tmp_path, argv(program=[*python(FACTS), "ours"])).returncode == 0
    for rank in (0, 1):
        found = {name: json.loads((tmp_path / f"{name}-{rank}").read_text()) for name in ("alone", "ours")}
        # Under mpirun alone standard output always is one, also where mpirun's own is a file.
        assert [found[name].pop("terminals")[1] for name in ("alone", "ours")] == [True, False]
        assert [found[name].pop("parent") for name in ("alone", "ours")] == ["mpirun", "python"]  # which stands for it
        assert found["alone"] == found["ours"]
