"""Steps of whole programs, counted on a GPU that is not there."""

import json
from functools import cache

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain import bert, effnet
from hvdtrain.program.dry_run import count_step, devices_of
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import models
from hvdtrain.tasks.vision import settings as images

TINY = "--model efficientnet_tiny --batch-size-per-rank 8"
KEYS = (
    *("dry_run", "program", "model", "unit", "precision", "batch_size_per_rank", "micro_batches", "parameters"),
    *("gradient_tensors", "gradient_bytes", "operations", "kernels", "flops", "bytes", "memory_bytes", "sharded_bytes"),
    *("devices", "cannot_see"),
)
OF_DEVICE = (
    *("name", "memory_bytes", "roofline_s", "step_s", "low_s", "high_s", "bound", "samples_per_s", "fits"),
    "largest_batch_per_rank",
)


@cache
def cost(words, program=effnet):
    settings = {effnet: images, bert: texts}[program].parse(["--dry-run", *words.split()])
    return count_step(program.main, SerialComm(), settings)


def test_parameters_and_state_are_exact():
    found, size = cost(TINY), sum(one.numel() for one in models.build("efficientnet_tiny", classes=10).parameters())
    memory = found.memory_bytes
    assert found.parameters == size
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.average) == (4 * size,) * 4
    assert found.gradient_bytes == 2 * size  # on a GPU they travel in fp16
    assert memory.total == 4 * 4 * size + memory.activations


def test_the_json_is_what_others_read():
    found = json.loads(cost(TINY).to_json())
    assert tuple(found) == KEYS
    assert [tuple(device) for device in found["devices"]] == [OF_DEVICE] * 4
    assert [device["name"] for device in found["devices"]] == ["v100", "a100", "h100", "h200"]
    assert (found["dry_run"], found["unit"], found["precision"], found["micro_batches"]) == (1, "images", "tf32", 1)
    total = found["memory_bytes"].pop("total")
    assert sum(found["memory_bytes"].values()) == total
    for device in found["devices"]:
        assert 0 < device["roofline_s"] <= device["step_s"]
        assert device["low_s"] <= device["step_s"] <= device["high_s"]
        assert device["fits"]


@pytest.mark.parametrize(
    ("words", "names"), [("--precision bf16", ["a100", "h100", "h200"]), ("--dry-run json,v100", ["v100"])]
)
def test_devices_are_those_that_have_the_precision_or_the_one_that_was_chosen(words, names):
    assert [device.name for device in devices_of(images.parse(["--dry-run", *words.split()]))] == names


def test_forward_and_backward_passes_take_three_times_the_forward_flops():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        models.build("efficientnet_tiny", classes=10, stem_stride=1)(torch.zeros(8, 3, 32, 32))
    first_layer = 2 * 8 * 16 * 32 * 32 * 3 * 9  # images have no gradient
    assert cost(TINY).flops == 3 * counter.get_total_flops() - first_layer


def program(model):
    data = {"inputs": torch.zeros(64, 4), "targets": torch.zeros(64, 1)}

    def losses(model, batch):
        return (model(batch["inputs"]) - batch["targets"]).square().mean(1)

    return lambda run: run.training(model, losses, data, data)


def own_cost(main, **words):
    return count_step(main, SerialComm(), hvdtrain.Settings(dry_run="on", batch_size_per_rank=8, **words))


def test_a_program_of_ones_own_gives_a_model_or_makes_it():
    made = own_cost(program(lambda: nn.Linear(4, 1)))
    given = own_cost(program(nn.Linear(4, 1)))
    read = own_cost(program(lambda: nn.Linear(4, int(torch.ones(1).item()))))
    assert made == given == read
    assert (made.parameters, made.flops, made.unit) == (5, 2 * 2 * 8 * 4, "samples")


def test_parameters_and_state_of_a_divided_optimizer_are_exact():
    main = program(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 1)))
    whole, divided = own_cost(main), own_cost(main, shard_optimizer=True)
    size = whole.parameters
    assert (divided.memory_bytes, divided.sharded_bytes, whole.sharded_bytes) == (whole.memory_bytes, 2 * 4 * size, 0)
    assert divided.gradient_bytes == 3 * size  # half in fp16, and half of the parameters in fp32
    whole_sums = own_cost(main, shard_optimizer=True, fusion_threshold_mb=0.0)
    assert whole_sums.gradient_bytes == 4 * size


def test_a_program_without_a_training_is_refused():
    with pytest.raises(BadInput, match="without a training"):
        own_cost(lambda _: None)


class ReadsValues(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 1), how

    def forward(self, inputs):
        return self.linear(self.how(inputs))


def leaves_torch(inputs):
    return torch.from_numpy(inputs.detach().numpy().copy())


def depends_on_values(inputs):
    return inputs[(inputs.sum(1) + 1).nonzero().squeeze(1)]


@pytest.mark.parametrize("how", [leaves_torch, depends_on_values])
def test_what_cannot_be_counted_but_trained_is_one_line_with_its_place(how):
    with pytest.raises(BadInput, match=r"^--dry-run: test_dry_run\.py:\d+ cannot be counted.* works\.$"):
        own_cost(program(lambda: ReadsValues(how)))
