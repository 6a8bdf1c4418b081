import pytest
from torch import nn

from hvdtrain.core.blocks import blocks_of
from hvdtrain.core.replica.parts import require_groups, require_parts, split_replicas
from hvdtrain.parallel.stages.cut import require_names, require_stages
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.model import BertForMaskedLM, blocks, sizes_of
from hvdtrain.tasks.vision import settings as images
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.unit.parallel.stages.test_blocks import effnet


def cut(stages, at=None):
    return require_stages(effnet()[1], stages, at)


def split(ranks, stages):
    return split_replicas(Rank(0, ranks), stages, "--stages")


def parse(words):
    return images.parse(words.split())


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: split(6, 4), "--stages 4: 6 ranks ... 4 or 8 ... --stages 3"),
        (lambda: split(1, 2), "--stages 2: 1 rank ... 2, or ... --stages 1"),
        (lambda: split(4, 2), "--stages 2 ... MPI ... mpirun or hvdlaunch"),  # these have none
        (lambda: cut(9), "--stages 9: ... 8 blocks ... 8 or fewer"),
        (lambda: cut(3, [2, 8]), "--stages 0,2,8: ... blocks 0 to 7"),
        (lambda: parse("--stages 4 --accumulate-steps 3"), "--stages 4 requires --accumulate-steps 4 or more"),
        (lambda: parse("--stages 0,3"), "--stages 0,3 requires --accumulate-steps 2 or more"),
        *(
            (
                lambda wrong=wrong: parse(f"--stages {wrong}"),
                f"--stages {wrong}: must be the number ... as in 3, or ... 0,4,9",
            )
            for wrong in ("0", "-2", "4,9", "0,", "0,4,2", "0,0", "0,2,2", "0,x", "1.5")
        ),
    ],
)
def test_stages_that_cannot_be(attempt, message):
    require_facts(refused(attempt), message)


def test_cuts_that_can_be():
    cut(3, [2, 7])
    cut(8)
    assert [parse(f"--stages {word} --accumulate-steps 8").parts[1] for word in ("8", "0,4", "0,4,9")] == [8, 2, 3]


def plan(ranks_per_replica):
    return {"hosts": [], "ranks_per_replica": ranks_per_replica}


@pytest.mark.parametrize(
    ("stages", "placed", "message"),
    [
        (4, 2, "--stages 4: ... with --ranks-per-replica 2 ... --ranks-per-replica 4"),
        (4, None, "--stages 4: ... without --ranks-per-replica ... --ranks-per-replica 4"),
        (1, 2, "--stages 1: ... with --ranks-per-replica 2 ... --ranks-per-replica 1"),
    ],
)
def test_other_groups_than_the_launchers(stages, placed, message):
    require_facts(refused(lambda: require_groups("--stages", stages, plan(placed))), message)
    require_groups("--stages", stages, None)  # no launcher has planned any
    require_groups("--stages", stages, plan(stages if stages > 1 else None))


def test_all_that_stages_require_is_named_at_once():
    alone = refused(lambda: parse("--stages 4"))
    require_facts(alone, "--stages 4 requires --accumulate-steps 4")
    line = refused(lambda: require_parts("--stages", 4, ranks=6, placement=plan(None), other_error=BadInput(alone)))
    require_facts(line, f"{alone} ... --ranks-per-replica 4 ... --stages 4: 6 ranks ... 4 or 8")
    assert "--stages 3" not in line  # which needs less of what is missing, but is not what was asked for
    require_parts("--stages", 4, ranks=8, placement=plan(4))


def test_a_parameter_with_two_names_is_refused_and_one_with_the_same_name_is_not():
    ends = nn.Linear(8, 8), nn.Linear(8, 8)
    ends[1].weight = ends[0].weight
    model = nn.Sequential(ends[0], nn.ReLU(), ends[1])
    line = refused(lambda: require_names(model, blocks_of(model)))
    assert line == "--stages: 0.weight and 2.weight are one parameter in two blocks. Give each its own."
    words = BertForMaskedLM(sizes_of("bert_tiny", vocabulary=50))
    require_names(words, blocks(words))
