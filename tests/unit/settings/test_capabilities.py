"""Which options work together, as a user meets them: all pairs of those that take or need a capability."""

import itertools
from functools import partial

import pytest

from hvdtrain.settings.capabilities import Capability, Use, require_together
from hvdtrain.settings.safety.exits import BadInput
from tests.pairs import OPTIONS, pairs, programs, reason, trials, use, words_of
from tests.refusals import options_refused_together, refused


@pytest.mark.parametrize("option", sorted({first for first, _ in pairs()}))
def test_an_option_is_refused_beside_those_of_the_table_and_no_others(option):
    for pair in (pair for pair in pairs() if pair[0] == option):
        for program in programs(pair):
            if reason(*pair) is None:
                program.parse(words_of(pair))
            else:
                assert options_refused_together(partial(program.parse, words_of(pair))) == {*pair}


def test_the_trials_are_sets_of_options_that_work_together_with_each_pair_that_does():
    tried = {frozenset(pair) for options in trials() for pair in itertools.combinations(options, 2)}
    assert tried == {frozenset(pair) for pair in pairs() if reason(*pair) is None}


def test_the_table_knows_every_capability_and_each_is_taken_and_needed():
    uses = [use(option) for option in OPTIONS]
    taken = {capability for one in uses for capability in one.takes}
    needed = {capability for one in uses for capability in one.needs}
    assert taken == needed == set(Capability)


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
