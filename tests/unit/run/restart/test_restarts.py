"""What is decided after a failure, and the whole of it against a world in which nothing takes time."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launch.errors import CommandError, HostError, HostfileError, ProcessError
from launch.hosts.host_facts import HostFacts
from launch.machine.mpi import Mpi
from launch.output import Log
from launch.placement.slots import hosts_of, place, with_slots
from launch.run.restart import fleet, restarts
from launch.run.restart.fleet import ranks_that_fit, usable_hosts
from launch.run.restart.restarts import RestartPolicy, Tally, final_status, run_with_restarts, with_attempt
from launch.run.supervise.run import RunResult
from tests.unit.machines import SOFTWARE, condition, hosts, machine, request

MPI = Mpi(path="/bin/mpirun", name="Open MPI", version=(4, 1, 8))
POLICY = RestartPolicy(restarts=5, min_np=2, grace_s=25)
LOST = {0: "unhealthy: lost", 3: "unhealthy: lost"}


def ended(status=1, *, stopped=False, why="it broke", **more):
    return RunResult(status=status, run_folder=None, why=why, stopped=stopped, **more)


def after(*attempts, policy=POLICY):
    """What the outcome is after these attempts: (ranks, how each ended)."""
    tally = Tally()
    for np, end in attempts:
        tally = with_attempt(tally, end, np)
    return final_status(tally, end, np, policy)


GROWN, NOT_SAVED = (ended(status, stopped=True, new_hosts=("h2",), checkpoint=7) for status in (0, 137))
NOTICED = ended(0, stopped=True, is_for_notice=True, why="host h2: the end", checkpoint=7)
OLD, NEW, NONE, REFUSED, TAKEN = ended(checkpoint=40), ended(checkpoint=50), ended(), ended(2), ended(75)
SILENT = ended(has_report=False)  # a program without hvdtrain


@pytest.mark.parametrize(
    ("attempts", "status"),
    [
        *(([(4, ended(status))], final) for status, final in ((0, 0), (3, 3), (1, None), (4, None), (137, None))),
        *(([(4, ended(status, stopped=True))], status) for status in (0, 143, 1)),
        ([(4, ended(9, is_finished=True))], 9),  # it failed at something later
        ([(4, NOTICED)] * 5, None),
        ([(4, NOTICED)] * 6, 0),
        ([(4, GROWN)] * 9, None),
        ([(4, NOT_SAVED)] * 5, None),
        ([(4, NOT_SAVED)] * 6, 137),  # a save that fails each time
        # Three restarts in a row without a new checkpoint.
        ([(4, OLD), (4, NONE), (4, OLD)], None),
        ([(4, OLD), (4, NONE), (4, OLD), (4, ended(checkpoint=39))], 5),
        ([(4, OLD), (4, NONE), (4, OLD), (4, NEW), (4, NONE)], None),
        ([(4, OLD), (4, NONE), (4, OLD), (4, ended(checkpoint=40, snapshot=44))], None),
        ([(4, ended(snapshot=44)), (4, NONE), (4, ended(snapshot=43)), (4, ended(snapshot=44))], 5),
        ([(4, NONE)] * 3, None),
        ([(4, NONE)] * 4, 5),
        ([(4, SILENT)] * 5, None),  # as often as it may
        ([(4, SILENT)] * 6, 1),
        # Bad input, unless the number of ranks is new.
        ([(4, REFUSED)], 2),
        ([(4, NONE), (3, REFUSED)], None),
        ([(4, NONE), (4, REFUSED)], 2),
        ([(4, NONE), (3, NONE), (3, REFUSED)], 2),
        # A lost race for a GPU is a restart in which the program has not run.
        ([(4, TAKEN)] * 5, None),
        ([(4, TAKEN)] * 6, 75),
        ([(4, TAKEN), *[(4, NONE)] * 3], None),
        ([(4, TAKEN), *[(4, NONE)] * 4], 5),
    ],
)
def test_which_ends_are_final(attempts, status):
    assert after(*attempts) == status


class World:
    """Hosts that answer or not, and attempts that end as the test says; time passes only in sleep()."""

    def __init__(self, *ends):
        self.ends = list(ends)
        self.topologies = {"h1": machine(), "h2": machine()}
        self.hosts, self.gpus_option = hosts(h1=2, h2=2), "all"
        self.np, self.silent, self.left, self.ending = 4, set(), {}, set()
        self.software = {}  # of hosts that have another one
        self.began, self.slept, self.probed, self.now = [], [], [], 100.0
        self.joining = []  # what a run finds beside it; None where it does not look
        self.local, self.kept, self.keeps = {"h1", "h2"}, [], 0  # hosts that are this one, bytes in memory
        self.apart = frozenset()  # hosts that do not see the folder
        self.meanwhile = {}  # after this attempt, or at this second, something happens

    def read(self):
        if isinstance(self.hosts, Exception):
            raise self.hosts
        return request(np=self.np, binding="none", hosts=self.hosts, gpus=self.gpus_option)

    def prepare(self, request, environment, folder, known=None):
        topologies = self.topologies if known is None else {host: facts.topology for host, facts in known.items()}
        listed = with_slots(request.hosts, topologies, np=request.np, gpus=request.gpus)
        np = request.np or sum(host.slots for host in listed)
        slots = place(listed, topologies, np=np, gpus=request.gpus, binding=request.binding)
        plan = SimpleNamespace(
            slots=slots,
            remarks=("be warned",),
            executable="/env/bin/prog",
            request=request,
            local=self.local,
            apart=frozenset() if known else self.apart,  # a restart does not look at folders
        )
        launcher = SimpleNamespace(mpi=MPI, python="python")
        environment = {"HVDLAUNCH_JOB": "job", **environment}
        names = [host.name for host in request.hosts]
        answers = {name: HostFacts(host=name, hostname=name, topology=topologies[name], mpi=MPI) for name in names}
        return SimpleNamespace(plan=plan, launcher=launcher, environment=environment, argv=["mpirun"], answers=answers)

    def run(self, prepared, *, grace_s, keepers, growth):
        assert prepared.environment["HVDLAUNCH_JOB"] == "job"
        assert prepared.plan.request.attempt.restart == len(self.began)
        self.began.append({host.name: host.slots for host in hosts_of(prepared.plan.slots)})
        pid, file, _ = prepared.plan.request.attempt.snapshots.split()
        self.kept.append(os.fstat(int(file)).st_size)
        os.ftruncate(int(file), self.keeps)
        assert int(pid) == os.getpid()
        self.gpus = [slot.gpu for slot in prepared.plan.slots]
        self.joining.append(growth and growth._find())
        end = self.ends.pop(0)
        self.meanwhile.pop(len(self.began), lambda: None)()
        if isinstance(end, Exception):
            raise end
        return end

    def probe_hosts(self, names, *, ssh, mpirun, python, folder, gpus, inspection=None):
        assert (mpirun, python, gpus) == (MPI, "python", self.gpus_option != "none")
        self.probed += [*names]
        conditions = {name: inspection and condition(software=self.software.get(name, SOFTWARE)) for name in names}
        plain = {name: HostFacts(host=name, hostname=name, topology=self.topologies[name], mpi=MPI) for name in names}
        return {name: replace(facts, condition=conditions[name]) for name, facts in plain.items()}

    def end_on(self, names, job, *, ssh, python, folder):
        assert job == "job"
        why = {name: HostError(f"host {name}: no route\nto it") for name in self.silent}
        return {name: why.get(name, self.left.pop(name, 0)) for name in names}

    def hosts_ending(self, names, cloud, *, ssh, python):
        return {name: HostError(f"host {name}: the end") for name in names if name in self.ending}

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        for at in [at for at in self.meanwhile if at > 100 and at <= self.now]:
            self.meanwhile.pop(at)()


@pytest.fixture
def world(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for logs
    made = World()
    for name in ("prepare", "run"):
        monkeypatch.setattr(restarts, name, getattr(made, name))
    for name in ("prepare", "probe_hosts", "end_on", "hosts_ending"):
        monkeypatch.setattr(fleet, name, getattr(made, name))
    monkeypatch.setattr(restarts.journal, "log", Log())
    monkeypatch.setattr(fleet, "time", SimpleNamespace(sleep=made.sleep, monotonic=lambda: made.now))
    return made


def result(world, *ends, policy=POLICY):
    world.ends += ends
    return run_with_restarts(world.read, policy, {})


def lines(capfd):
    """What it prints, without the program and how bad it is."""
    return [re.sub("^hvdlaunch: (error: |warning: |note: )?", "", line) for line in capfd.readouterr().err.splitlines()]


def test_hosts_can_be_added_and_are_never_more_than_asked_for(world):
    world.topologies["h3"] = machine()
    world.meanwhile = {
        1: lambda: (world.silent.add("h2"), setattr(world, "hosts", hosts(h1=2, h2=2, h3=1))),
        2: lambda: setattr(world, "hosts", hosts(h3=4, h1=2)),
    }
    assert result(world, ended(), ended(), ended(0)) == 0
    assert world.began[1:] == [{"h1": 2, "h3": 1}, {"h3": 4}]


def grown(*hosts):
    return ended(0, stopped=True, new_hosts=hosts, checkpoint=7)


def test_a_host_that_is_back_joins_by_a_restart_that_is_no_failure(world, capfd):
    back = lambda: (world.silent.clear(), world.sleep(60), setattr(world, "hosts", hosts(h2=2, h1=2)))  # noqa: E731
    world.meanwhile = {1: lambda: world.silent.add("h2"), 2: back}
    assert result(world, ended(checkpoint=5), grown("h2"), ended(0), policy=replace(POLICY, restarts=1)) == 0
    assert world.began == [{"h1": 2, "h2": 2}, {"h1": 2}, {"h1": 2, "h2": 2}]
    assert world.joining == [None, ("h2",), None]
    assert lines(capfd)[-1] == "host h2 is back or new; 4 ranks on h1:2,h2:2, from step 7"


def test_a_host_that_cannot_join_is_not_asked_beside_the_run_again(world):
    world.hosts = hosts(h1=2, h2=2, h3=2)
    world.topologies["h3"] = machine()
    world.software, world.ending = {"h3": replace(SOFTWARE, torch="1.0")}, {"h2"}
    assert result(world, ended(), grown("h3"), ended(), ended(0)) == 0
    assert world.began[1:] == [{"h1": 2}] * 3
    assert world.joining == [None, ("h3",), (), ()]


def test_hosts_that_are_added_and_would_end_the_run_are_left_out_also_where_they_are_the_more(world, capfd):
    world.hosts = hosts(h1=2)
    world.topologies |= {"h3": machine(), "h4": machine()}
    world.software = dict.fromkeys(("h3", "h4"), replace(SOFTWARE, torch="1.0"))
    added = hosts(h3=2, h4=2, h1=2, h2=2)
    one_left = machine(unusable=dict.fromkeys(range(3), "unhealthy: lost"))
    world.np = None
    world.meanwhile = {1: lambda: (setattr(world, "hosts", added), world.topologies.update(h1=one_left))}
    assert result(world, ended(), ended(0), policy=replace(POLICY, min_np=1)) == 0
    assert world.began == [{"h1": 2}, {"h1": 1, "h2": 1}]
    told = [line for line in lines(capfd) if line.startswith("host ")]
    assert [line.partition(":")[0] for line in told] == ["host h3", "host h4"]
    assert all(f"torch 1.0, on h1 {SOFTWARE.torch}" in line and "`make setup`" in line for line in told)


def test_without_min_np_it_waits_for_as_many_ranks_as_at_first(world, capfd):
    world.meanwhile = {1: lambda: world.silent.add("h2"), 110: world.silent.clear}
    assert result(world, ended(), ended(0), policy=replace(POLICY, min_np=None)) == 0
    assert world.began == [{"h1": 2, "h2": 2}] * 2
    assert "2 slots are left, --min-np is 4. Waiting up to 600 s for enough hosts." in lines(capfd)


def test_more_ranks_at_least_than_there_are_is_refused_before_anything_starts(world):
    with pytest.raises(CommandError, match=r"^--min-np 5: only 4 ranks fit: pass a number up to that$"):
        result(world, policy=replace(POLICY, min_np=5))
    assert world.began == []


def test_a_hostfile_that_is_just_being_edited_changes_nothing(world, capfd):
    world.meanwhile = {1: lambda: setattr(world, "hosts", HostfileError("hosts:3: h1 is there twice"))}
    assert result(world, ended(), ended(0)) == 0
    assert world.began == [{"h1": 2, "h2": 2}] * 2
    assert "hosts:3: h1 is there twice; keeping the previous hosts" in lines(capfd)


def test_a_host_that_has_lost_gpus_has_fewer_ranks_and_none_on_its_cpus(world):
    world.meanwhile = {
        1: lambda: world.topologies.update(h1=machine(unusable={**LOST, 1: "unhealthy: lost"})),
        2: lambda: world.topologies.update(h1=machine(0), h2=machine(0)),
    }
    assert result(world, ended(), ended(9)) == 9
    assert world.began == [{"h1": 2, "h2": 2}, {"h1": 1, "h2": 2}]
    assert world.gpus[0] == 2


def test_gpus_that_were_named_are_the_only_ones_that_may_be_used_also_busy_ones(world):
    world.gpus_option = (0, 1)
    world.meanwhile = {
        1: lambda: world.topologies.update(h1=machine(unusable={0: "busy: pid 7"})),
        2: lambda: world.topologies.update(h1=machine(unusable=LOST)),
    }
    assert result(world, ended(checkpoint=1), ended(checkpoint=2), ended(0)) == 0
    assert world.began == [{"h1": 2, "h2": 2}, {"h1": 2, "h2": 2}, {"h1": 1, "h2": 2}]
    assert world.gpus == [1, 0, 1]


@pytest.mark.parametrize(
    ("busy", "free_at", "ranks", "looks"),
    [((0, 1, 2), 102, 2, 1), ((0, 1, 2), 148, 2, 24), ((0, 1, 2), 999, 1, 25), ((1, 3), 999, 2, 0)],
    ids=["for a moment", "for long", "for too long", "which the run has not used"],
)
def test_a_gpu_that_is_busy_has_50_seconds_to_be_free(world, busy, free_at, ranks, looks):
    world.meanwhile = {
        1: lambda: world.topologies.update(h1=machine(unusable=dict.fromkeys(busy, "busy: pid 7"))),
        free_at: lambda: world.topologies.update(h1=machine()),
    }
    assert result(world, ended(), ended(0)) == 0
    assert world.began[1] == {"h1": ranks, "h2": 2}
    assert world.slept == [2] * looks


def test_a_host_with_a_notice_is_left_out_as_long_as_it_has_one(world, capfd):
    world.meanwhile = {
        1: lambda: world.ending.add("h2"),
        2: lambda: (world.ending.clear(), setattr(world, "now", 200)),
    }
    assert result(world, NOTICED, NOTICED, ended(0)) == 0
    assert world.began == [{"h1": 2, "h2": 2}, {"h1": 2}, {"h1": 2, "h2": 2}]
    assert {
        "host h2: the end; skipping this host",
        "restart 1 of 5 after: host h2: the end; 2 ranks on h1:2, from step 7",
    } <= set(lines(capfd))


@pytest.mark.parametrize(
    ("checkpoint", "keeps", "start"),
    [
        (None, 0, "no checkpoint was saved yet"),
        (None, 9, "from the state in memory"),
        (5, 0, "from step 5"),
        (5, 9, "from step 5 or later, in memory"),
    ],
)
def test_the_state_in_memory_is_kept_for_the_next_ranks_on_this_host(world, capfd, checkpoint, keeps, start):
    world.keeps = keeps
    assert result(world, ended(checkpoint=checkpoint), ended(0)) == 0
    assert lines(capfd)[-1].endswith(f"on h1:2,h2:2, {start}")
    assert world.kept == [0, keeps]


@pytest.mark.parametrize(("here", "kept"), [("h1", 9), ("h2", 0)])
def test_the_state_in_memory_is_forgotten_where_rank_0_goes_on_elsewhere_without_it(world, here, kept):
    world.keeps, world.local = 9, {here}
    assert result(world, ended(), ended(0)) == 0
    assert world.kept == [0, kept]


@pytest.mark.parametrize("before", [0, 1])  # restarts, of which the last attempt ends before it has a report
@pytest.mark.parametrize(
    ("lost", "sees", "is_shared", "status"),
    [("h1", True, True, 0), ("h1", True, False, 7), ("h1", False, True, 7), ("h2", False, False, 0)],
)
def test_a_run_whose_folder_is_lost_with_a_host_does_not_begin_again(
    world, capfd, *, lost, sees, is_shared, status, before
):
    world.apart = frozenset() if sees else frozenset(["h1", "h2"])
    world.meanwhile = {1 + before: lambda: world.silent.add(lost)}
    ends = replace(ended(7), is_shared=is_shared), *[ended(7)] * before, ended(0)
    assert result(world, *ends, policy=replace(POLICY, min_np=2)) == status
    assert any("h1 had rank 0" in line for line in lines(capfd)) == (status > 0)
    assert len(world.began) == 1 + before + (status == 0)


def test_a_host_that_has_failed_twice_is_left_out_for_the_rest_if_enough_others_are_left(world, capfd):
    world.topologies["h3"], world.hosts = machine(), hosts(h1=2, h2=2, h3=2)
    failed = [ended(host=host, checkpoint=step) for step, host in enumerate(("h2", "h1", "h2", "h1", "h3", "h3"))]
    assert result(world, *failed, ended(0), policy=replace(POLICY, restarts=6)) == 0
    all_hosts = {"h1": 2, "h2": 2}
    assert world.began == [*[all_hosts] * 3, {"h1": 2, "h3": 2}, *[{"h3": 2}] * 2, all_hosts]
    told = [line for line in lines(capfd) if "has failed" in line]
    assert told[0] == "host h2 has failed 2 times; leaving it out if enough others are left"
    assert len(told) == 3


@pytest.mark.parametrize(
    ("gpus", "end", "probed"),
    [
        ("none", {"is_ranks_fault": True}, ["h3"]),
        ("none", {"is_ranks_fault": False}, ["h1", "h2", "h3"]),
        ("all", {"is_ranks_fault": True}, ["h1", "h2", "h3"]),
    ],
)
def test_a_host_is_probed_again_only_if_it_is_suspect(world, gpus, end, probed):
    world.gpus_option, world.topologies["h3"] = gpus, machine()
    world.meanwhile = {1: lambda: setattr(world, "hosts", hosts(h1=2, h2=2, h3=2))}
    assert result(world, replace(ended(), **end), ended(0)) == 0
    assert world.probed == probed


@pytest.mark.parametrize(("min_np", "next_hosts", "slept"), [(2, {"h1": 2}, []), (4, {"h1": 2, "h2": 2}, [1.0])])
def test_a_host_that_is_lost_is_not_waited_for_unless_hosts_are_short(world, min_np, next_hosts, slept):
    world.gpus_option = "none"
    lost = ended(host="h2", is_host_lost=True)
    assert result(world, lost, ended(0), policy=replace(POLICY, min_np=min_np)) == 0
    assert (world.began[1], world.slept) == (next_hosts, slept)
    assert world.joining[1] == (("h2",) if min_np == 2 else None)


@pytest.mark.parametrize(("is_shared", "apart"), [(False, frozenset()), (True, frozenset({"h1"}))])
def test_a_host_that_alone_has_the_run_folder_is_asked_though_it_was_lost(world, is_shared, apart):
    world.apart = apart
    assert result(world, ended(host="h1", is_host_lost=True, is_shared=is_shared), ended(0)) == 0
    assert world.began == [{"h1": 2, "h2": 2}] * 2


def test_too_few_slots_are_waited_for_with_longer_and_longer_pauses(world, capfd):
    world.meanwhile = {1: lambda: world.silent.update(("h1", "h2")), 120: lambda: world.silent.discard("h1")}
    assert result(world, ended(), ended(0)) == 0
    assert world.slept == [1, 2, 4, 8, 16]
    assert world.began[1] == {"h1": 2}
    printed = lines(capfd)
    assert printed.count("0 slots are left, --min-np is 2. Waiting up to 600 s for enough hosts.") == 1
    assert printed.count("host h2: no route to it; skipping this host") == 1


@pytest.mark.parametrize(("end", "status"), [(ended(205), 205), (NOTICED, 1)], ids=["failed", "saved"])
def test_it_does_not_wait_for_ever_and_has_not_trained_to_its_end(world, capfd, end, status):
    world.meanwhile = {1: lambda: world.silent.update(("h1", "h2"))}
    assert result(world, end) == status
    assert 560 < sum(world.slept) <= 600
    assert lines(capfd)[-1] == "0 slots are left, --min-np is 2. Gave up after waiting 600 s."


@pytest.mark.parametrize(("last", "is_printed"), [(0, False), (3, False), (2, False), (7, True), (143, False)])
def test_that_restarts_are_used_up_is_told_only_where_it_matters(world, capfd, last, is_printed):
    end = ended(last, stopped=last == 143)
    world.meanwhile = {2: lambda: world.left.update(h1=1)}
    assert result(world, ended(), end, policy=replace(POLICY, restarts=1)) == last
    printed = lines(capfd)
    assert any("--restarts 1" in line for line in printed) == is_printed
    assert ("1 leftover processes killed on h1" in printed) == (last in (2, 3, 7))  # no host is asked after a stop


def test_a_launcher_that_cannot_be_started_is_bad_input_at_first_and_later_a_failure_like_others(world, capfd):
    trouble = ProcessError("no folder can be made in /tmp: No space left on device")
    with pytest.raises(ProcessError):
        result(world, trouble)
    world.began.clear()
    assert result(world, ended(), trouble, ended(0)) == 0
    assert "restart 2 of 5 after: no folder can be made in /tmp: No space left" in lines(capfd)[-1]


def test_as_many_ranks_as_fit_are_started_in_whole_replicas():
    assert ranks_that_fit(9, np=4, min_np=2, refused=()) == 4
    assert ranks_that_fit(9, np=4, min_np=2, refused=(4,)) == 3
    assert ranks_that_fit(2, np=4, min_np=2, refused=(2,)) is None
    assert ranks_that_fit(6, np=8, min_np=1, refused=(6,), ranks_per_replica=2) == 4
    known = {"h1": machine(unusable={0: "lost"}), "h2": machine(), "h3": machine()}
    listed = hosts(h1=4, h2=4, h3=1)
    assert usable_hosts(listed, known, on_gpus=True, ranks_per_replica=2) == hosts(h1=2, h2=4)
