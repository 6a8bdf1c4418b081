"""Pure: common mistakes on the command line, and what was probably meant."""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath

# Options of other launchers, and former ones -> the equivalents here.
MEANT = {
    **dict.fromkeys(("--np", "--ntasks", "--num-proc", "--num_proc", "-k"), "-np"),
    **dict.fromkeys(("-host", "--host", "-hosts", "--hosts", "--slurm-nodes"), "-H"),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile"), "--hostfile"),
    **dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--num_gpus"), "--per-host"),
    **dict.fromkeys(("-npernode", "--npernode", "-ppn"), "--per-host"),
    "-np": "-k",
    "--traffic": "--measured",
    "--sbatch": "--batch FILE.sh",
    "--mpijob": "--batch FILE.yaml",
    **dict.fromkeys(("--sbatch-option", "--mpijob-option"), "--batch-option"),
    "--price": "--price-per-gpu-hour",
}
GONE = {
    "--dry-run": "hvdlaunch plan shows what hvdlaunch run would do",
    "--elastic": "--restarts N starts all ranks again from their newest state",
    "--grow": "with --restarts N a host that is back joins",
    "--recovery-s": "--restart-s is the time of a loss",
    "--driver-timeout-s": "leave it out: to keep the GPU driver loaded, run nvidia-smi -pm 1",
}
NUMBER_OF_HOSTS = ("--nnodes", "--num_nodes")  # -H takes host names instead
STARTERS = {"torchrun", "mpirun", "mpiexec", "horovodrun", "hvdlaunch", "srun", "accelerate", "deepspeed"}
STARTERS |= {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}  # python -m


def in_options(arguments: Sequence[str], options: Collection[str]) -> str | None:
    """Return all known mistakes in the arguments of a command with these `options`; None if there are none."""
    wrong = []
    for word in dict.fromkeys(_options_of(arguments)):
        meant = MEANT.get(word, "")
        if meant.partition(" ")[0] in options and word not in options:
            wrong.append(f"{word} is unknown: write {meant}")
        elif word in GONE and word not in options:
            wrong.append(f"{word} is gone: {GONE[word]}")
        elif word in NUMBER_OF_HOSTS and "-H" in options:
            wrong.append(f"{word} is unknown: name the hosts, as in -H node1,node2")
    if (hosts := _hosts_in_several_words(arguments)) is not None:
        wrong.append(f"-H takes one word: write -H {hosts}")
    return "; ".join(wrong) or None


def _hosts_in_several_words(arguments: Sequence[str]) -> str | None:
    """Join the hosts of -H a:8 b:8 into one argument; return None if they are already joined."""
    start = arguments.index("-H") + 1 if "-H" in arguments else len(arguments)
    end = start + 1
    while end < len(arguments) and not arguments[end].startswith("-"):
        if not (arguments[end - 1].endswith(",") or re.fullmatch(r"[\w.-]+:[0-9]+,?", arguments[end])):
            break
        end += 1
    return ",".join(word.strip(",") for word in arguments[start:end]) if end > start + 1 else None


def _options_of(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments that look like options, up to the possible beginning of a program."""
    before = ""
    for word in arguments:
        if word.startswith("-"):
            yield word.partition("=")[0]
        elif not before.startswith("-"):
            return
        before = word


def unknown(arguments: Sequence[str], options: Collection[str]) -> str:
    """Return the message for arguments that no option of a command has taken."""
    from difflib import get_close_matches

    line = f"unrecognized arguments: {' '.join(arguments)}"
    unknown = (word.partition("=")[0] for word in arguments if word.startswith("-"))
    near = [match for word in unknown for match in get_close_matches(word, [*options], 1, cutoff=0.8)]
    return f"{line}: did you mean {', '.join(near)}?" if near else line


def runnable(program: Sequence[str], *, installed: bool) -> list[str]:
    """Return the program, with python before a script unless the script is `installed` as an executable."""
    return ["python", *program] if program[0].endswith(".py") and not installed else list(program)


def in_program(program: Sequence[str], *, installed: bool) -> str | None:
    """Return why a program cannot be a rank; `installed` is whether it is executable. None if no problem is known."""
    first = PurePath(program[0]).name
    module = re.fullmatch(r"python[0-9.]*", first) and len(program) > 2 and program[1] == "-m"
    name = program[2] if module else first
    if name in STARTERS:
        return (
            f"-- {name}: each rank would start ranks of its own: leave {name} and its options out, "
            "hvdlaunch starts them all, as in -- python train.py"
        )
    if (meant := runnable(program, installed=installed)) != list(program):
        return f"-- {program[0]} cannot be executed: write -- {shlex.join(meant)}"
    return None
