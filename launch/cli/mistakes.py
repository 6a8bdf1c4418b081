"""Pure: what people write by mistake, and what they mean."""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath

# The words of other launchers, and old ones of ours -> what a command may have in their place.
MEANT = {
    **dict.fromkeys(("--np", "--ntasks", "--num-proc", "--num_proc", "-k"), ("-np",)),
    **dict.fromkeys(("-host", "--host", "-hosts", "--hosts", "--nnodes", "--num_nodes"), ("-H",)),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile"), ("--hostfile",)),
    **dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--num_gpus"), ("--per-host",)),
    **dict.fromkeys(("-npernode", "--npernode", "-ppn"), ("--per-host",)),
    "-np": ("-k",),
    "--busy": ("--gpus",),
    "--from": ("--hostfile", "--topology"),
}
STARTERS = {"torchrun", "mpirun", "mpiexec", "horovodrun", "hvdlaunch", "srun", "accelerate", "deepspeed"}
STARTERS |= {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}  # python -m


def in_options(words: Sequence[str], options: Collection[str]) -> str | None:
    """What is wrong with the words of a command that has these `options`; None where nothing is known."""
    for word in _options_of(words):
        meant = next((option for option in MEANT.get(word, ()) if option in options), None)
        if meant is not None and word not in options:
            return f"{word} is no option here: write {meant}"
    for option, value, following in zip(words, words[1:], words[2:], strict=False):
        several = value.endswith(",") or re.fullmatch(r"[\w.-]+:[0-9]+,?", following)
        if option == "-H" and several and not following.startswith("-"):
            return f"-H takes one word: write -H {value.rstrip(',')},{following.rstrip(',')}"
    return None


def _options_of(words: Sequence[str]) -> Iterator[str]:
    """The words that look like options, up to the first that is no option's value: there a program may begin."""
    before = ""
    for word in words:
        if word.startswith("-"):
            yield word.partition("=")[0]
        elif not before.startswith("-"):
            return
        before = word


def unknown(words: Sequence[str], options: Collection[str]) -> str:
    """What to say of words that no option of a command has taken."""
    from difflib import get_close_matches

    line = f"unrecognized arguments: {' '.join(words)}"
    near = get_close_matches(words[0].partition("=")[0], [*options], 1, cutoff=0.8)
    return f"{line}: did you mean {near[0]}?" if near else line


def before_a_command(words: Sequence[str], program: Sequence[str]) -> str | None:
    """What to say of a command line without a command; None where it has one."""
    if words and (not words[0].startswith("-") or words[0] in ("-h", "--help", "--version")):
        return None
    meant = ["hvdlaunch", "run", *words, "--", *(program or ["PROGRAM"])]
    return f"no command: write {shlex.join(meant)}; see hvdlaunch --help"


def without_dashes(words: Sequence[str], stray: Sequence[str], program: Sequence[str]) -> str:
    """What to say of `stray` words, the last ones of a command: most often they are a program without -- before it."""
    if program:
        return f"{stray[0]!r} is no option's value: leave it out, the program stands after --"
    options = words[: len(words) - len(stray)]
    return f"put -- before the program: {shlex.join(['hvdlaunch', *options, '--', *stray])}"


def in_program(program: Sequence[str], *, found: bool) -> str | None:
    """What is wrong with a program as a rank, where this machine has `found` it or not; None where nothing is known."""
    first = PurePath(program[0]).name
    module = re.fullmatch(r"python[0-9.]*", first) and len(program) > 2 and program[1] == "-m"
    name = program[2] if module else first
    if name in STARTERS:
        return (
            f"-- {name}: each rank would start ranks of its own: leave {name} and its options out, "
            "hvdlaunch starts them all, as in -- python train.py"
        )
    if first.endswith(".py") and not found:
        return f"-- {program[0]} cannot be executed: write -- {shlex.join(['python', *program])}"
    return None
