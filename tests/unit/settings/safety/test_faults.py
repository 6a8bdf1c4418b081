import json
import math

import pytest

from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.faults import NONE, Faults


def parse(text, rank=0, **environment):
    return Faults.parse({"HVDTRAIN_FAULT": text, **environment}, rank)


@pytest.mark.parametrize("environment", [{"HVDTRAIN_FAULT": ""}, {"HVDLAUNCH_RANK": "{}"}])
def test_without_the_variable_there_are_none(environment):
    assert Faults.parse(environment, 0) is NONE
    assert NONE.announcement is None
    NONE.inflict_at("step", 1)
    assert NONE.loss_factor(1) == 1


@pytest.mark.parametrize(("restart", "fires"), [(0, True), (12, False)])
def test_only_the_first_attempt_has_faults(restart, fires):
    faults = parse("nan@rank0:step3", HVDLAUNCH_RANK=json.dumps({"restart": restart}))
    assert math.isnan(faults.loss_factor(3)) == fires
    assert (faults.announcement is not None) == fires


@pytest.mark.parametrize(("where", "struck"), [("0", [0]), ("12", [12]), ("all", [0, 1, 2, 12])])
def test_a_fault_strikes_its_rank_and_all_announce_it(where, struck):
    text = f"spike@rank{where}:step1"
    faults = {rank: parse(text, rank) for rank in (0, 1, 2, 12)}
    assert [rank for rank, one in faults.items() if one.loss_factor(1) > 1] == struck
    [line] = {one.announcement for one in faults.values()}
    assert f"HVDTRAIN_FAULT={text}" in line


@pytest.mark.parametrize(("place", "number"), [("start", 0), ("save", 7)])
def test_a_fault_fires_at_its_place_and_once(place, number):
    spelled = f"raise@rank0:{place}{number or ''}"
    faults = parse(f"{spelled}, raise@rank0:step77")
    for other_place, other_number in [("start", 0), ("step", 7), ("save", 7), ("eval", 7), (place, 8)]:
        if (other_place, other_number) != (place, number):
            faults.inflict_at(other_place, other_number)
    with pytest.raises(RuntimeError, match=f"injected fault {spelled}"):
        faults.inflict_at(place, number)
    faults.inflict_at(place, number)


@pytest.mark.parametrize(
    "wrong",
    [
        "kill@rank1",
        "kill@1:step7",
        "kill@rank1:step0",
        "nan:3@rank1:step1",
        "kill@rank1:start1",
        "kill@rank-1:step7",
        "corrupt@rank1:step7",
        "kill@rank1:step7;kill@rank2:step7",
        "",  # a comma too many
    ],
)
def test_a_wrong_spelling_is_refused_on_every_rank(wrong):
    for rank in (0, 5):
        with pytest.raises(BadInput, match=r"^HVDTRAIN_FAULT: .* kill@rank1:step7\.$") as refused:
            parse(f"nan@rank0:step1,{wrong}", rank)
        assert repr(wrong) in str(refused.value)


@pytest.mark.parametrize(("kind", "place"), [("nan", "start"), ("bitflip", "save1")])
def test_a_step_s_faults_strike_steps_only(kind, place):
    with pytest.raises(BadInput, match=f"{kind}@rank1:stepN"):
        parse(f"{kind}@rank1:{place}")


def test_a_spike_may_have_a_factor():
    assert [parse(f"spike{factor}@rank0:step3").loss_factor(3) for factor in ("", ":3", ":1.5")] == [1000, 3, 1.5]


def test_nan_poisons_one_step():
    faults = parse("nan@rank0:step3,bitflip@rank0:step4")
    for step in (1, 2, 3):
        faults.inflict_at("step", step)
    assert [math.isnan(faults.loss_factor(step)) for step in (1, 2, 3, 3, 4)] == [False, False, True, False, False]
