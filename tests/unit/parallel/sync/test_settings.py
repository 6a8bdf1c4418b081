import pytest

from hvdtrain.parallel.sync.comm import SyncSchedule
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.refusals import refused, require_facts
from tests.steps import required_sizes

FORMS = "must be flat, two-level, local:16 ... or local:16@5 ... Append /4"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(
            (["--sync", wrong], f"--sync {wrong}: {FORMS}")
            for wrong in ("local", "local:0", "local:4@", "local:4/0", "local/4", "two-level:4", "flat/2", "ring")
        ),
        (["--sync", "local:4@6", "--epochs", "6"], "--sync local:4@6: ... 6 epochs"),
    ],
)
def test_a_wrong_choice_is_one_line(words, line):
    require_facts(refused(lambda: texts.parse(words)), line)


@pytest.mark.parametrize(
    ("words", "every", "group_size"),
    [
        (["--sync", "two-level", "--sync-bn"], None, None),
        (["--sync", "two-level/4"], None, 4),
        (["--sync", "local:1", "--sync-bn"], None, None),  # flat: with Adam, means at every step are another result
        (["--sync", "local:16"], SyncSchedule(steps=16, from_epoch=0), None),
        (["--sync", "local:16@5/4"], SyncSchedule(steps=16, from_epoch=5), 4),
    ],
)
def test_rounds_and_groups_are_those_of_the_command_line(words, every, group_size):
    settings = images.parse(words)
    assert (settings.rounds, settings.sync_group_size) == (every, group_size)


def test_rounds_are_no_longer_than_an_epoch():
    def cut(every):
        config = images.parse(["--sync", every, "--batch-size-per-rank", "10", "--data", "digits"])
        return required_sizes(config, train=100, test=10, ranks=2)

    assert cut("local:5").steps_per_epoch == 5
    for every in ("local:6", "local:6@2"):
        require_facts(refused(lambda every=every: cut(every)), f"--sync {every}: ... 5 steps ... at most 5")


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
