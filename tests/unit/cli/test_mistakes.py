"""What people write by mistake is answered with what they mean, and nothing has started."""

import pytest

from tests.unit.cli.commands import output, refusal

TRAIN = ("--", "python", "train.py")
GPU4 = ("--topology", "pix4.txt")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("sweep -np 1,2 python x.py -np 3", "put -- before the program: hvdlaunch sweep -np 1,2 -- python x.py -np 3"),
        ("plan -np 2 me -- prog", "'me' is not the value of an option. Write hvdlaunch plan -np 2 -- prog; see"),
        ("run -np 0 -- prog", "argument -np: '0' is not a positive integer; see hvdlaunch run --help"),
        ("run --restart 5 -- prog", "unrecognized arguments: --restart: did you mean --restarts?"),
        ("plan -np 2 -H localhost --topology cpu.json -- prog", "(localhost 1): write localhost:2"),
        ("plan --gpus none --topology pix4.txt -- prog", "--gpus none on localhost: pass -np N"),
        ("run --sbatch job -H a,b -- prog", "--sbatch requires -np N (the tasks of the job), or -H A:N"),
        ("run --sbatch job --dry-run -np 2 -- prog", "--sbatch does not work with --dry-run"),
        ("plan -H a:2 --per-host 4 --topology a=pix4.txt -- prog", "--per-host 4 is more than the 2 slots of host a"),
    ],
)
def test_a_mistake_is_answered_with_what_is_meant(capsys, folder, words, line):
    before = sorted(folder.rglob("*"))
    assert line in refusal(capsys, *words.split())
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "program",
    ["torchrun --nproc_per_node 2 train.py", "/usr/bin/mpiexec -n 2 x", "python3.11 -m torch.distributed.run x"],
)
@pytest.mark.parametrize("start", ["run -np 2 --sbatch job", "sweep -np 1,2"])
def test_what_starts_ranks_of_its_own_is_refused_inside_ranks(capsys, folder, start, program):
    line = refusal(capsys, *start.split(), "--", *program.split())
    assert "each rank would start ranks of its own: leave " in line
    assert not (folder / "job").exists()


@pytest.mark.parametrize("program", ["python torchrun.py", "python -m train.mpirun", "python -m", "./x.py"])
def test_a_program_that_only_looks_alike_is_none(capsys, folder, program):
    (folder / "x.py").touch(mode=0o755)
    assert "mpirun" in output(capsys, "plan", "-np", "2", *GPU4, "--", *program.split())


def test_words_of_the_program_are_its_own(capsys):
    assert "--hosts" in output(capsys, "plan", "-np", "2", *GPU4, "--", "prog", "--hosts", "-np", "0", "--busy")
    assert "prog --hosts" in refusal(capsys, "run", "--nsys", "-np", "2", "prog", "--hosts", "x")
