import pytest

from hvdtrain.parallel.sync.comm import SyncSchedule
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.refusals import refused, require_facts
from tests.steps import required_sizes

LOCAL = ["--sync", "local", "--sync-every"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sync-group-size", "2"], "--sync-group-size 2 requires --sync two-level, or --sync local --sync-every 16"),
        (["--sync", "two-level", "--sync-every", "4"], "--sync-every 4 requires --sync local"),
        (["--sync", "local"], "--sync local requires --sync-every 16, the steps of a round, or 16@5"),
        ([*LOCAL, "0"], "--sync-every 0: ... --sync-every 16, or 16@5"),
        ([*LOCAL, "4@"], "--sync-every 4@: ... the steps of a round"),
        ([*LOCAL, "4", "--sync-group-size", "0"], "--sync-group-size 0: must be at least 1"),
        ([*LOCAL, "4@6", "--epochs", "6"], "--sync-every 4@6: ... 6 epochs"),
    ],
)
def test_a_wrong_choice_is_one_line(words, line):
    require_facts(refused(lambda: texts.parse(words)), line)


@pytest.mark.parametrize(
    ("words", "every"),
    [
        (["--sync", "two-level", "--sync-bn"], None),
        ([*LOCAL, "1", "--sync-bn"], None),  # the flat path: with Adam, means at every step are another result
        ([*LOCAL, "16"], SyncSchedule(steps=16, from_epoch=0)),
        ([*LOCAL, "16@5"], SyncSchedule(steps=16, from_epoch=5)),
    ],
)
def test_rounds_are_those_of_the_command_line(words, every):
    assert images.parse(words).rounds == every


def test_rounds_are_no_longer_than_an_epoch():
    def cut(every):
        config = images.parse([*LOCAL, every, "--batch-size-per-rank", "10", "--data", "digits"])
        return required_sizes(config, train=100, test=10, ranks=2)

    assert cut("5").steps_per_epoch == 5
    for every in ("6", "6@2"):
        require_facts(refused(lambda every=every: cut(every)), f"--sync-every {every}: ... 5 steps ... at most 5")


@pytest.mark.parametrize(
    ("words", "on_cpus", "on_gpus"),
    [
        ([], "none", "fp16"),
        (["--compression", "none"], "none", "none"),
        (["--compression", "powersgd:3"], "powersgd:3", "powersgd:3"),
    ],
)
def test_gradients_are_compressed_as_asked_or_as_the_device_has_it(words, on_cpus, on_gpus):
    settings = images.parse(words)
    assert [settings.compression_on(kind).name for kind in ("cpu", "cuda")] == [on_cpus, on_gpus]
