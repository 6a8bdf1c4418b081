import socket

import pytest

from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import BadInput
from tests.ranks import saying
from tests.refusals import refused, require_facts


def raising(text):
    def decide():
        raise BadInput(text)

    return decide


def test_agreed_gives_the_decision_of_this_rank():
    ranks = saying(["one", None], ["two", None])
    assert agree(ranks, lambda: 42) == 42
    assert ranks.said == [[socket.gethostname(), None]]


def test_agreed_raises_on_ranks_that_had_no_problem():
    ranks = saying(["one", None], ["two", "no such file"], ["three", "other"])
    assert refused(lambda: agree(ranks, lambda: 42)) == "rank 1 on two: no such file"


def test_agreed_tells_all_ranks_what_this_one_found():
    ranks = saying(["one", "broken"], ["two", None])
    assert refused(lambda: agree(ranks, raising("broken"))) == "rank 0 on one: broken"
    assert ranks.said == [[socket.gethostname(), "broken"]]


def test_agreed_leaves_the_rank_out_where_all_say_the_same():
    assert refused(lambda: agree(saying(["one", "bad"], ["two", "bad"]), raising("bad"))) == "bad"
    differently = saying(["one", "bad a"], ["two", "bad b"])
    assert refused(lambda: agree(differently, raising("bad a"))) == "rank 0 on one: bad a"
    assert refused(lambda: agree(SerialComm(), raising("bad"))) == "bad"


def test_agreed_lets_other_errors_through():
    ranks = saying(["one", None])
    with pytest.raises(ZeroDivisionError):
        agree(ranks, lambda: 1 / 0)


def test_equal_facts_are_fine():
    ranks = saying(["one", {"--lr": "0.1"}], ["two", {"--lr": "0.1"}])
    require_equal(ranks, {"--lr": "0.1"})
    assert ranks.said == [[socket.gethostname(), {"--lr": "0.1"}]]


@pytest.mark.parametrize(
    ("first", "other", "values"),
    [
        ({"--lr": "0.1", "--seed": "0"}, {"--lr": "0.3", "--seed": "0"}, ("--lr", "'0.1'", "'0.3'")),
        ({"steps": 3}, {"steps": 4}, ("steps", "3", "4")),
        ({"steps": 3, "new": 1}, {"steps": 3}, ("new", "1", "None")),
        ({"steps": 3}, {"steps": 3, "new": 1}, ("new", "None", "1")),
    ],
)
def test_different_facts_name_ranks_hosts_and_both_values(first, other, values):
    ranks = saying(["one", first], ["one", first], ["two", other])
    name, ours, theirs = values
    message = refused(lambda: require_equal(ranks, first))
    require_facts(message, f"{name}: rank 0 on one ... {ours} ... rank 2 on two ... {theirs}")
