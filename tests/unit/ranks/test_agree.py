import socket
from unittest.mock import Mock

import pytest

from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.settings.safety.exits import BadInput
from tests.ranks import saying
from tests.refusals import refused, require_facts


def test_agreed_gives_the_decision_of_this_rank():
    ranks = saying(["one", None], ["two", None])
    assert agree(ranks, lambda: 42) == 42
    assert ranks.said == [[socket.gethostname(), None]]


@pytest.mark.parametrize(
    ("ranks", "own", "line"),
    [
        ([["one", None], ["two", "no such file"], ["three", "other"]], None, "rank 1 on two: no such file"),
        ([["one", "broken"], ["two", None]], "broken", "rank 0 on one: broken"),
        ([["one", "bad"], ["two", "bad"]], "bad", "bad"),
        ([["one", "bad a"], ["two", "bad b"]], "bad a", "rank 0 on one: bad a"),
    ],
)
def test_the_first_error_is_raised_on_all_ranks_with_the_rank_unless_all_have_it(ranks, own, line):
    comm = saying(*ranks)
    assert refused(lambda: agree(comm, Mock(side_effect=BadInput(own)) if own else lambda: 42)) == line
    assert comm.said == [[socket.gethostname(), own]]


@pytest.mark.parametrize(
    ("first", "other", "values"),
    [
        ({"--lr": "0.1", "--seed": "0"}, {"--lr": "0.3", "--seed": "0"}, ("--lr", "'0.1'", "'0.3'")),
        ({"steps": 3}, {"steps": 3, "new": 1}, ("new", "None", "1")),
    ],
)
def test_different_facts_name_ranks_hosts_and_both_values(first, other, values):
    ranks = saying(["one", first], ["one", first], ["two", other])
    require_equal(saying(["one", first], ["two", first]), first)
    name, ours, theirs = values
    message = refused(lambda: require_equal(ranks, first))
    require_facts(message, f"{name}: rank 0 on one ... {ours} ... rank 2 on two ... {theirs}")
