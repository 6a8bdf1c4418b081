import re

import pytest

from launch.errors import CommandError, PlacementError
from launch.hosts.host import Host
from launch.placement.slots import place
from launch.run.start.sbatch import cores_per_rank, job_name, parse_options, require_room, sbatch, tasks
from tests.unit.machines import hosts, machine, refusal_of


def script(**changes):
    plain = {"name": "x", "folder": "/", "np": 1, "nodes": (), "gpus": False, "grace_s": 25}
    return sbatch(["true"], **{**plain, "cores_per_rank": 1, "options": {}, "environment": {}, **changes})


def asked(text):
    """What a script asks Slurm for."""
    words = (line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH"))
    return dict(word.partition("=")[::2] for word in words)


def test_a_name_with_a_line_end_begins_no_line_of_the_script():
    text = script(name="a\nrm -rf x", folder="/a\nb")
    assert text.splitlines()[1] == "#SBATCH --job-name=a_rm_-rf_x"
    assert "cd '/a\nb' || exit 2\n" in text
    assert text.endswith('\nexport HVDLAUNCH_JOB="${HVDLAUNCH_JOB:-a_rm_-rf_x-$SLURM_JOB_ID}"\nexec true\n')
    assert ":-hidden-$SLURM_JOB_ID" in script(name=".hidden")


def test_the_users_options_stand_in_place_of_ours():
    plain = asked(script(gpus=True, np=8, cores_per_rank=4))
    assert plain["gpus-per-task"] == "1"
    assert (plain["ntasks"], plain["cpus-per-task"], plain["requeue"]) == ("8", "4", "")
    options = {"gres": "gpu:a100:8", "cpus-per-task": "12", "no-requeue": None, "mem": "0", "output": "o"}
    own = asked(script(gpus=True, np=8, cores_per_rank=4, options=options))
    assert options.items() <= {key: value or None for key, value in own.items()}.items()
    assert not {"gpus-per-task", "requeue"} & own.keys()
    per_node = {"nodes": "2", "ntasks-per-node": "4"}
    assert "ntasks" not in asked(script(np=8, options=per_node))
    assert "ntasks" in asked(script(np=8, options={"ntasks-per-node": "4"}))
    plain = asked(script(np=8, per_host=4))
    assert (plain["ntasks"], plain["ntasks-per-node"]) == ("8", "4")
    assert asked(script(np=8, per_host=4, options={"ntasks-per-node": "2"}))["ntasks-per-node"] == "2"


@pytest.mark.parametrize("word", ["", "time=", "--time=1", "time=1\n#SBATCH --uid=0", "comment=\u202e"])
def test_what_is_no_option_of_sbatch_is_refused_in_one_line(word):
    line = refusal_of(CommandError, lambda: parse_options([word]))
    assert re.match(r"--batch-option '.*': pass KEY=VALUE, or only KEY", line)


def test_options_of_sbatch_are_read_once_each():
    options = {"time": "4:00:00", "exclusive": None, "comment": "a=b c"}
    assert parse_options(["time=4:00:00", "exclusive", "comment=a=b c"]) == options
    with pytest.raises(CommandError, match="--batch-option time is repeated"):
        parse_options(["time=1", "time=2"])


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({"nodes": "2", "ntasks-per-node": "4"}, 8),
        ({"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "a100:8"}, 16),
        ({"ntasks": "4"}, 4),
        # Slurm decides.
        ({}, None),
        ({"nodes": "2-4", "ntasks-per-node": "1"}, None),
        ({"nodes": "2", "ntasks-per-node": "1", "gpus-per-task": "8"}, None),
    ],
)
def test_more_ranks_than_the_job_has_slots_are_refused_before_the_queue(options, slots):
    require_room(slots or 9000, options)
    if slots:
        with pytest.raises(PlacementError, match=rf"^-np {slots + 1} exceeds the {slots} available slots"):
            require_room(slots + 1, options)


def test_each_task_gets_its_share_of_the_cores_of_the_smallest_host():
    topologies = {"a": machine(), "b": machine(cores=range(9))}

    def cpus(**slots):
        where = hosts(**slots)
        placed = place(where, topologies, np=sum(slots.values()), gpus="all", binding="numa")
        return cores_per_rank(placed, topologies)

    assert cpus(a=4) == 4
    assert cpus(a=4, b=2) == 4
    assert cpus(a=4, b=4) == 2
    topologies["c"] = machine(gpus=0, cores=())
    assert cpus(c=2) is None  # not known
    topologies["c"] = machine(gpus=0, cores=(0,))
    assert cpus(c=2) == 1


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ({}, "4"),
        ({"cpus-per-gpu": "8"}, None),
        ({"tres-per-task": "cpu=8"}, None),
        ({"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "a100:8"}, "32"),  # one task has eight ranks
        ({"nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "64"}, "64"),  # no more than there are
        ({"nodes": "2", "ntasks-per-node": "1", "gpus-per-task": "8"}, "32"),
    ],
)
def test_each_rank_gets_its_cores_however_many_a_task_has(options, cpus):
    assert asked(script(np=16, gpus=True, cores_per_rank=4, options=options)).get("cpus-per-task") == cpus


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("/opt/venv/bin/python3.11", "-u", "-X", "dev", "-m", "hvdtrain.effnet"), "hvdtrain.effnet"),
        (("python", "-W", "error", "/my/train.py", "-m", "x"), "train"),
        (("python", "-c", "print(1)"), "python"),
        (("python", "-m"), "python"),
        (("/bin/my prog", "a.py"), "my prog"),
    ],
)
def test_a_job_is_called_like_what_it_runs(program, name):
    assert job_name(program) == name


def test_the_number_of_tasks_is_that_of_ranks_slots_or_the_users_options():
    bare = Host(name="a", slots=1, counted=False)
    assert tasks(3, hosts(a=2), {"ntasks": "8"}) == 3
    assert tasks(None, hosts(a=2, b=4), {}) == 6
    assert tasks(None, (bare,), {"ntasks": "8"}) == 8
    assert tasks(None, None, {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8"}) == 16
    for where in (None, (bare,), (*hosts(b=2), bare)):
        assert tasks(None, where, {"gpus": "8"}) is None
