"""Which options work together, in pairs: a table for the docs (`python -m tests.pairs`), and runs that try them."""

import itertools
import string
from collections.abc import Iterable
from functools import cache
from types import ModuleType

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import methods
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images

# Those that change how ranks work together, and what each needs beside it; the ones that cost a run most come first.
OPTIONS = {
    "--compile": "",
    "--stages 2": "--accumulate-steps 2",
    "--tensor 2": "",
    "--sync two-level": "--sync two-level/1",
    "--sync local": "--sync local:2/1",
    "--compression powersgd:2": "",
    "--compression fp16": "",
    "--reducer horovod": "",
    "--shard-optimizer": "",
    "--fusion-threshold-mb 0": "",
    "--fusion-threshold-mb 8": "",
    "--precision fp16": "",
    "--optimizer lamb": "",
    "--deterministic": "",
    "--recompute": "",
    "--find-nan": "",
    "--on-spike skip": "",
    "--batch-size-per-rank auto": "--global-batch-size 64",
    "--profile exact": "--epochs 2",
    "--profile timeline": "",
    "--sync-bn": "",
    "--freeze-embeddings": "",
}
OF_ONE_PROGRAM = {"--sync-bn": images, "--tensor 2": texts, "--freeze-embeddings": texts}
Pair = frozenset[str]


def words_of(options: Iterable[str]) -> list[str]:
    """The command line with these options."""
    return " ".join(word for option in options for word in (option, OPTIONS[option])).split()


def programs(options: Iterable[str]) -> list[ModuleType]:
    """The settings of the programs that have all of these options."""
    return [one for one in (images, texts) if all(OF_ONE_PROGRAM.get(option, one) is one for option in options)]


def pairs() -> list[tuple[str, str]]:
    """Those that can stand in one command line at all."""
    of_two = itertools.combinations(OPTIONS, 2)
    return [pair for pair in of_two if programs(pair) and pair[0].split()[0] != pair[1].split()[0]]


@cache
def use(option: str) -> Use:
    """What the option takes and needs, if anything."""
    settings = programs([option])[0].parse(words_of([option]))
    found: Use
    [found] = [one for of_group in methods(settings, "uses") for one in of_group()] or [Use(option=option)]
    assert found.option == option
    return found


def reason(one: str, other: str) -> Capability | None:
    """Why they do not work together, if they do not."""
    both = [*set(use(one).needs) & set(use(other).takes), *set(use(other).needs) & set(use(one).takes)]
    return next((capability for capability in Capability if capability in both), None)


def table() -> str:
    """The pairs in Markdown, with a letter for each reason that forbids one."""
    reasons = {pair: reason(*pair) for pair in pairs()}
    given = [capability for capability in Capability if capability in reasons.values()]
    letters = dict(zip(given, string.ascii_lowercase, strict=False))

    def cell(one: str, other: str) -> str:
        if (pair := (one, other) if (one, other) in reasons else (other, one)) not in reasons:
            return ""
        forbidden = reasons[pair]
        return "+" if forbidden is None else letters[forbidden]

    lines = [
        f"| | option | {' | '.join(str(number) for number, _ in enumerate(OPTIONS, 1))} |",
        f"|--:|---|{':-:|' * len(OPTIONS)}",
    ]
    for number, one in enumerate(OPTIONS, 1):
        lines.append(f"| {number} | `{one}` | {' | '.join(cell(one, other) for other in OPTIONS)} |")
    return "\n".join([*lines, "", *(f"- {letter}: {capability.value}" for capability, letter in letters.items())])


def trials() -> list[tuple[str, ...]]:
    """Sets of options that work together, in which each pair that works is at least once."""
    work = {Pair(pair) for pair in pairs() if reason(*pair) is None}
    tried: set[Pair] = set()
    sets = []

    def gain(option: str, among: list[str]) -> int:
        """How many new pairs it makes; none where it does not work with one of them."""
        made = {Pair((option, one)) for one in among}
        return len(made - tried) if made <= work and programs([option, *among]) else 0

    for first in OPTIONS:
        while any(first in pair for pair in work - tried):
            chosen = [first]
            while gain(best := max(OPTIONS, key=lambda option: gain(option, chosen)), chosen):
                chosen.append(best)
            tried |= {Pair(pair) for pair in itertools.combinations(chosen, 2)}
            sets.append(tuple(chosen))
    return sets


if __name__ == "__main__":
    print(table())
