import torch

from hvdtrain.train.feed import Resident
from tests.steps import CPU


def test_resident_split_gives_the_images_of_the_indices_in_their_order():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 2)
    split = Resident(images=images, labels=torch.arange(5) * 10)
    batches = list(split.batches([torch.tensor([4, 0]), torch.tensor([2])], CPU))
    found = [(batch["images"], batch["labels"]) for batch in batches]
    assert [labels.tolist() for _, labels in found] == [[40, 0], [20]]
    assert [raw[:, 0, 0, 0].tolist() for raw, _ in found] == [[4, 0], [2]]
    assert len(split) == 5


def test_resident_split_gives_an_empty_batch_for_no_indices():
    split = Resident(images=torch.zeros(5, 3, 4, 4, dtype=torch.uint8), labels=torch.arange(5))
    none = torch.tensor([], dtype=torch.int64)
    batches = list(split.batches([none, torch.tensor([2]), none], CPU))
    found = [(batch["images"], batch["labels"]) for batch in batches]
    assert [tuple(raw.shape) for raw, _ in found] == [(0, 3, 4, 4), (1, 3, 4, 4), (0, 3, 4, 4)]
    assert [labels.tolist() for _, labels in found] == [[], [2], []]
    assert {(raw.dtype, labels.dtype) for raw, labels in found} == {(torch.uint8, torch.int64)}
