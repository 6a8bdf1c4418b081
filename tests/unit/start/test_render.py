import json

import pytest

from launch.errors import CommandError
from launch.start.render import MAX_PLAN_CHARACTERS
from tests.unit.start.specs import HOROVODRUN, THREE, TRAIN, plan, rendered


def planned(run):
    return json.loads(run.environment["HVDLAUNCH_PLAN"])


def test_the_plan_tells_each_rank_its_place():
    given = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "PATH": "/bin"}
    found = planned(rendered(where=THREE, environment=given, exports=("NCCL_DEBUG", "PATH")))
    assert (found["launcher"], found["program"]) == ("Open MPI 4.1.8", list(TRAIN))
    assert found["environment"] == {"NCCL_DEBUG": "INFO"}
    assert [rank["hostname"] for rank in found["ranks"]] == ["h1.local", "h1.local", "h2.cluster.example.local"]
    assert found["ranks"][1] == {
        "rank": 1,
        "host": "h1",
        "hostname": "h1.local",
        "local_rank": 1,
        "gpu": 2,
        "gpu_uuid": "GPU-2222",
        "numa": [1],
        "cores": "8-15",
        "threads": 8,
        "interface": None,
        "adapters": [],
        "environment": dict(plan(THREE).slots[1].environment),
    }


def test_what_belongs_to_this_host_is_unset_where_a_launcher_exports_all():
    unset = dict.fromkeys(("HOME", "TMPDIR", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR"))
    for changes, more in (({"where": THREE, "horovodrun": HOROVODRUN}, unset), ({"horovodrun": HOROVODRUN}, {})):
        run = rendered(**changes)
        own = run.plan.slots[0].environment
        assert planned(run)["ranks"][0]["environment"] == {**own, **more}
        assert planned(run)["launcher"] == "horovodrun, Open MPI 4.1.8"


def test_the_plan_and_the_job_come_on_top_of_what_the_launcher_inherits():
    run = rendered(environment={"PATH": "/bin", "HVDLAUNCH_JOB": "old"})
    ours = {"HVDLAUNCH_PLAN": run.environment["HVDLAUNCH_PLAN"], "HVDLAUNCH_JOB": "a job"}
    assert run.environment == {"PATH": "/bin", **ours}


def test_a_plan_that_no_variable_holds_is_refused():
    with pytest.raises(CommandError, match="the plan of 2 ranks takes 13"):
        rendered(program=("x" * MAX_PLAN_CHARACTERS,))
