import json

import pytest

import hvdtrain
from hvdtrain.program import remedies
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision.settings import parse

TINY = ["--data", "digits", "--model", "efficientnet_tiny"]


def names(words, *, has_gpus=False, environment=()):
    found = remedies.fitting_remedies(parse([*TINY, *words]), has_gpus=has_gpus, cores=4, environment=dict(environment))
    return [remedy.name for remedy in found]


@pytest.mark.parametrize("words", [[], ["--sync", "local:4"], ["--compression", "powersgd:2"]])
def test_each_remedy_is_taken_by_the_command_line_of_the_program(words):
    settings = parse([*TINY, *words])
    found = remedies.fitting_remedies(settings, has_gpus=True, cores=4, environment={})
    assert len(found) > 3
    for remedy in found:
        changed = parse([*TINY, *words, *remedy.options])
        assert {name: getattr(changed, name) for name in remedy.settings} == dict(remedy.settings)
        assert changed != settings or remedy.environment
    parse([*TINY, *words, *remedies.MEASURE, *remedies.PROFILE])


def test_a_length_in_steps_is_measured_in_steps(capsys):
    words = ["--data", "text", "--task", "mlm", "--data-dir", "texts", "--max-steps", "100"]
    settings = texts.parse(words)
    remedies.print_remedies(settings)
    found = json.loads(capsys.readouterr().out)
    texts.parse([*words, *found["measure"]])
    assert (settings.max_steps, found["epochs"]) == (100, None)


def test_what_is_there_already_or_does_not_fit_is_not_named():
    assert "--precision bf16" not in names(["--precision", "bf16"])
    assert "--compile" not in names(["--compile"])
    assert not [name for name in names(["--deterministic"]) if name.startswith("--fusion-threshold-mb")]
    assert not [name for name in names(["--sync", "local:4"]) if "two-level" in name]


def test_gpus_have_others_than_cpus():
    on_cpus, on_gpus = names([], environment={"OMP_NUM_THREADS": "1"}.items()), names([], has_gpus=True)
    assert {"OMP_NUM_THREADS=2", "OMP_NUM_THREADS=4", "--compression fp16"} <= {*on_cpus}
    assert {"NCCL_ALGO=Tree", "--precision fp16"} <= {*on_gpus}
    assert {"NCCL_ALGO=Tree", "--precision fp16", "OMP_NUM_THREADS=1"}.isdisjoint(on_cpus)


def test_accumulated_batches_become_larger_ones_at_the_same_global_batch():
    found = names(["--batch-size-per-rank", "8", "--accumulate-steps", "4"])
    assert "--batch-size-per-rank 16 --accumulate-steps 2" in found
    assert "--global-batch-size 32" in names(["--global-batch-size", "8"])


def test_what_changes_the_training_comes_last_and_says_so_and_what_does_not_work_together_is_named(capsys):
    remedies.print_remedies(hvdtrain.Settings())
    found = json.loads(capsys.readouterr().out)["remedies"]
    same = [remedy["same_training"] for remedy in found]
    assert same == sorted(same, reverse=True)
    others = {remedy["name"]: set(remedy["not_with"]) for remedy in found}
    local, low_rank = "--sync local:16", "--compression powersgd:2"
    assert {local, low_rank} <= {remedy["name"] for remedy in found if not remedy["same_training"]}
    assert low_rank in others[local]
    assert {local, "--sync two-level", "--reducer horovod"} <= others[low_rank]
    assert not others["--compression fp16"]
