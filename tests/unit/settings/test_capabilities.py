"""Which options work together, as a user meets them: all pairs of those that take or need a capability."""

import itertools
from functools import partial

import pytest

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Capability, Use, require_together
from hvdtrain.settings.group import methods
from hvdtrain.text import settings as texts
from hvdtrain.vision import settings as images
from tests.refusals import options_refused_together, refused

OPTIONS = [
    "--stages 2",
    "--tensor 2",
    "--sync two-level",
    "--sync local",
    "--elastic",
    "--compression powersgd:2",
    "--compression fp16",
    "--reducer horovod",
    "--fusion-threshold-mb 0",
    "--fusion-threshold-mb 8",
    "--deterministic",
    "--precision fp16",
    "--optimizer lamb",
    "--compile",
    "--recompute",
    "--find-nan",
    "--profile exact",
    "--timeline",
    "--sync-bn",
    "--freeze-embeddings",
]
BESIDES = {"--stages 2": "--accumulate-steps 2", "--sync local": "--sync-every 4"}

CUT = "--compile --compression_powersgd:2 --elastic --find-nan --precision_fp16 --profile_exact --timeline"
APART = "--compression_powersgd:2 --elastic --timeline"
REFUSED = {
    "--stages 2": f"{CUT} --sync_two-level --sync_local --tensor_2 --sync-bn --freeze-embeddings",
    "--tensor 2": f"{CUT} --sync_two-level --sync_local --optimizer_lamb",
    "--sync two-level": f"{APART} --compression_fp16",
    "--sync local": f"{APART} --profile_exact --sync-bn",
    "--elastic": "--compression_powersgd:2 --reducer_horovod --profile_exact --timeline",
    "--compression powersgd:2": "--precision_fp16 --reducer_horovod --fusion-threshold-mb_0 --fusion-threshold-mb_8",
    "--deterministic": "--fusion-threshold-mb_8",
    "--precision fp16": "--optimizer_lamb",
    "--recompute": "--compile --sync-bn",
    "--compile": "--sync-bn",
}
PAIRS = {frozenset((one, other.replace("_", " "))) for one, others in REFUSED.items() for other in others.split()}


def words_of(*options):
    return " ".join([*options, *(BESIDES[option] for option in options if option in BESIDES)]).split()


def is_pair(one, other):
    """Whether both can stand in one command line at all."""
    return one.split()[0] != other.split()[0] and {one, other} != {"--sync-bn", "--tensor 2"}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_refused_beside_those_of_the_table_and_no_others(option):
    for other in OPTIONS:
        if not is_pair(option, other):
            continue
        parses = [images.parse] * ({"--tensor 2", "--freeze-embeddings"}.isdisjoint((option, other)))
        parses += [texts.parse] * ("--sync-bn" not in (option, other))
        for parse in parses:
            if frozenset((option, other)) in PAIRS:
                assert options_refused_together(partial(parse, words_of(option, other))) == {option, other}
            else:
                parse(words_of(option, other))


def test_the_table_knows_every_capability_and_each_is_taken_and_needed():
    taken, needed = set(), set()
    for option in OPTIONS:
        settings = (images if option == "--sync-bn" else texts).parse(words_of(option))
        found = [use for uses in methods(settings, "uses") for use in uses()]
        assert [use.option for use in found] == [option]
        taken |= set(found[0].takes)
        needed |= set(found[0].needs)
    assert taken == needed == set(Capability)


def test_rounds_at_every_step_leave_the_layers_together():
    assert images.parse(["--sync", "local", "--sync-every", "1", "--sync-bn"]).sync_bn


def test_a_setting_may_take_what_it_needs_itself():
    alone = Use(option="--a", takes=(Capability.WORLD,), needs=(Capability.WORLD,))
    require_together([alone])
    with pytest.raises(BadInput):
        require_together([alone, Use(option="--b", takes=(Capability.WORLD,))])


@pytest.mark.parametrize("capability", Capability)
def test_a_refusal_names_both_options_the_reason_and_the_remedy(capability):
    uses = [Use(option="--a 1", takes=(capability,)), Use(option="--b 2", needs=(capability,))]
    line = f"--b 2 does not work with --a 1: {capability.value}. Use only one."
    assert {refused(partial(require_together, order)) for order in itertools.permutations(uses)} == {line}
