"""Every command and option that a refusal proposes is itself taken."""

import re
import shlex

import pytest

from tests.unit.cli.commands import ended, refusal

PLACEHOLDERS = {"N": "2", "A:N": "a:2", "PROGRAM": "prog", "image=IMAGE": "image=a", "claim=NAME": "claim=b"}


def is_taken(capsys, words):
    """Whether hvdlaunch has nothing against a command but that there is no mpirun."""
    status, _, err = ended(capsys, *words)
    return status == 0 or "hvdlaunch: error: no mpirun on PATH" in err or err


WHOLE = [
    "-np 2 train.py --lr 1",
    "-np 2 -- train.py",
    "-np 2",
    "-np 1,2 sweep prog",
    "-np 2 me you -- prog",
    "-H a check",
]
WHOLE += ["run -np 2 --apptainer x.sif ./train.py", "plan -np 2 me --gpus none you -- prog", "sweep train.py -np 3"]
WHOLE += ["run -np 2 train.py -- --epochs 5"]


@pytest.mark.parametrize("words", WHOLE)
def test_a_whole_command(capsys, folder, words):
    (folder / "x.sif").touch()
    line = refusal(capsys, *words.split())
    proposed = re.search(r"(?:[Ww]rite|program:) hvdlaunch (.*?); see hvdlaunch ", line)[1]
    assert is_taken(capsys, shlex.split(proposed)) is True


CPUS = "--topology a=cpu.json --topology b=cpu.json"
PAIRS = f"--ranks-per-replica 2 {CPUS}"


@pytest.mark.parametrize(
    ("words", "remedies", "mended"),
    [
        ("run --np 2 --hosts a:4 -- prog", ["write -np;", "write -H;"], "run -np 2 -H a:4 -- prog"),
        ("run -np 1 --traffic run -- prog", ["write --measured;"], "run -np 1 --measured m.json -- prog"),
        ("run -np 2 --slurm-nodes n[1-2]:4 -- prog", ["write -H;"], "run -np 2 -H n[1-2]:4 -- prog"),
        (
            "run -np 2 --sbatch job --sbatch-option time=1 -- prog",
            ["write --batch FILE.sh;", "write --batch-option;"],
            "run -np 2 --batch job.sh --batch-option time=1 -- prog",
        ),
        (
            "run -np 2 --mpijob job -- prog",
            ["write --batch FILE.yaml;"],
            "run -np 2 --batch job.yml --batch-option image=a --batch-option claim=b -- prog",
        ),
        ("run -H a:8 b:8 c:8, d -- prog", ["write -H a:8,b:8,c:8,d;"], "run -H a:8,b:8,c:8,d -- prog"),
        ("run --nnodes 2 -- prog", ["as in -H node1,node2;"], "run -H node1,node2 -- prog"),
        ("run --restart=5 --min-npp=2 -- prog", ["--restarts, --min-np?"], "run --restarts=5 --min-np=2 -- prog"),
        (f"plan -np 6 {PAIRS} -H a,b -- prog", ["write a:4,b:4"], f"plan -np 6 {PAIRS} -H a:4,b:4 -- prog"),
        (f"plan -H a,b {CPUS} -- prog", ["pass --per-host N"], f"plan --per-host 2 -H a,b {CPUS} -- prog"),
        ("plan --topology cpu.json -- prog", ["pass -np N"], "plan -np 3 --topology cpu.json -- prog"),
        ("run --min-np 1 -- prog", ["requires --restarts"], "run --min-np 1 --restarts 2 -- prog"),
        ("check --nccl-debug", ["--bandwidth starts: add that"], "check --nccl-debug --bandwidth"),
        ("run -np 2 -- x.py", ["write -- python x.py"], "run -np 2 -- python x.py"),
    ],
)
def test_words_of_a_command(capsys, words, remedies, mended):
    line = refusal(capsys, *words.split())
    assert [remedy for remedy in remedies if remedy not in line] == [], line
    assert is_taken(capsys, mended.split()) is True


@pytest.mark.parametrize("words", ["run --batch job.yml", "run --batch job -- prog", "sweep -- prog"])
def test_all_that_is_missing_at_once(capsys, words):
    line = refusal(capsys, *words.split())
    needed = re.sub(r" \([^)]*\)", "", line.partition(" requires ")[2]).split(", or ")[0].replace(", -- PROGRAM", "")
    more = [PLACEHOLDERS.get(word, word) for word in needed.replace(", -", " -").split()]
    command, _, program = words.partition(" -- ")
    assert is_taken(capsys, [*command.split(), *more, "--", program or "prog"]) is True


def test_all_that_is_wrong_is_named_at_once(capsys):
    line = refusal(capsys, "run", "-np", "2", "--batch", "job.yaml", "-H", "a:2", "--gpus", "0-1", "--nccl-debug")
    assert set(re.findall(r"(\S+) does not work with --batch FILE.yaml", line)) == {"-H", "--gpus", "--nccl-debug"}
    assert refusal(capsys, "plan", "-np", "2", "-x", "A", "-x", "B", "--", "prog").startswith("-x A -x B: not set in")
    line = refusal(capsys, "plan", "-H", "a:1,b:1,c:1", "--topology", "a=cpu.json", "--", "prog")
    assert line == "no saved topology of b, c: add --topology b=FILE, one for each, or leave --topology out"
