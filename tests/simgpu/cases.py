"""Which steps are tried on the simulated GPU, and how often the host may wait in one; without torch."""

import itertools
from collections.abc import Mapping

EFFNET, CLASSIFY, MLM, FUNCTION = "effnet", "bert classify", "bert mlm", "own function"
ONE_RANK, BUCKET, HOROVOD, POWER_SGD = "one rank", "bucket", "horovod", "powersgd"
FIND_NAN, SYNC_BN, UNCOMPRESSED = "--find-nan", "--sync-bn", "--compression none"
ON_SPIKE = "--on-spike skip"
FP16 = "fp16"

_TEXTS = "--data json --vocab-size 200 --batch-size-per-rank 4 --dropout 0"
# Of each factor the values, and the words that they are on the command line. Ranks are alike, and nothing is random, so
# that the weights can be compared with those of the same steps on the host.
FACTORS: Mapping[str, Mapping[str, str]] = {
    "sums": {
        BUCKET: "--reducer bucket",
        ONE_RANK: "",
        HOROVOD: "--reducer horovod",
        POWER_SGD: "--reducer bucket --compression powersgd:2",
    },
    "optimizer": {name: f"--optimizer {name}" for name in ("sgd", "rmsprop", "adam", "adamw", "lars", "lamb")},
    "program": {
        EFFNET: "--data digits --model efficientnet_tiny --batch-size-per-rank 4 --dropout 0 --stochastic-depth 0",
        CLASSIFY: f"--task classify {_TEXTS}",
        MLM: f"--task mlm {_TEXTS}",
        FUNCTION: "--batch-size-per-rank 4",
    },
    "precision": {name: f"--precision {name}" for name in ("fp32", "bf16", FP16)},
    "extra": {"nothing": "", **{words: words for words in (FIND_NAN, UNCOMPRESSED, "--recompute", ON_SPIKE, SYNC_BN)}},
    "clip": {"none": "", "norm": "--clip-norm 0.5", "value": "--clip-value 0.01"},
    "passes": {number: f"--accumulate-steps {number}" for number in ("1", "2")},
    "average": {"none": "--ema-epochs 0", "weights": "--ema-epochs 2"},
}
Case = dict[str, str]  # a value of each factor


def words_of(case: Case) -> list[str]:
    """The command line."""
    return " ".join(FACTORS[factor][value] for factor, value in case.items()).split()


def name_of(case: Case) -> str:
    """What is not the first of its values."""
    others = [value for factor, value in case.items() if value != next(iter(FACTORS[factor]))]
    return ", ".join(others) or "plain"


def ranks_of(case: Case) -> int:
    """How many there are."""
    return 1 if case["sums"] == ONE_RANK else 2


def is_possible(case: Case) -> bool:
    """Whether the program takes these options together: it refuses the others."""
    if case["extra"] == SYNC_BN and case["program"] != EFFNET:
        return False
    if case["extra"] == ON_SPIKE and case["sums"] in (HOROVOD, POWER_SGD):
        return False
    return case["sums"] != POWER_SGD or (case["precision"] != FP16 and case["extra"] != UNCOMPRESSED)


def covering(at_once: int) -> list[Case]:
    """Cases in which each `at_once` values of as many factors, possible beside the first of the others, are tried."""
    plain = {factor: next(iter(values)) for factor, values in FACTORS.items()}
    together = itertools.combinations(FACTORS.items(), at_once)
    values = (itertools.product(*([(factor, one) for one in ones] for factor, ones in some)) for some in together)
    missing = {some: None for some in itertools.chain(*values) if is_possible(plain | dict(some))}
    cases = []
    while missing:
        first = next(iter(missing))
        case = plain | dict(first)
        for factor in [one for one in FACTORS if one not in dict(first)]:
            choices = [case | {factor: value} for value in FACTORS[factor]]
            case = max(
                filter(is_possible, choices),
                key=lambda one: sum(some in missing for some in itertools.combinations(one.items(), at_once)),
            )
        for some in itertools.combinations(case.items(), at_once):
            missing.pop(some, None)
        cases.append(case)
    return cases


# How often the host waits for the device in a step; what stands in no table waits never.
WAITS_OF_OPTIMIZER = {"rmsprop": 1, "lars": 1, "lamb": 1}  # whether the step is skipped
WAITS_OF_EXTRA = {FIND_NAN: 1}  # the same
WAITS_OF_SUMS = {
    BUCKET: 1,  # for the last bucket, whose sum is behind the others' on Horovod's stream
    POWER_SGD: 4,  # for three sums that follow each other, and torch's hook for the device
}
WAITS_PER_LAYER = 2  # of batch norm over all ranks: forward and backward, in each micro-batch


def waits_of(case: Case, *, responses: int, norm_layers: int) -> int:
    """How often the host waits in a step in which Horovod gives so many responses, each to what it sums at once."""
    waits = WAITS_OF_OPTIMIZER.get(case["optimizer"], 0) + WAITS_OF_EXTRA.get(case["extra"], 0)
    if ranks_of(case) == 1:
        return waits
    of_layers = WAITS_PER_LAYER * norm_layers * int(case["passes"]) if case["extra"] == SYNC_BN else 0
    if case["sums"] == HOROVOD:  # at most once for each response, those to layers among them
        return waits + responses
    return waits + of_layers + WAITS_OF_SUMS[case["sums"]]
