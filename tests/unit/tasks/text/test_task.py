import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from hvdtrain.core.phases import INPUT
from hvdtrain.core.task import metrics_of, total
from hvdtrain.loop.feed.sequences import Sequences
from hvdtrain.settings import command_line
from hvdtrain.tasks.text.settings import BertSettings
from hvdtrain.tasks.text.task import Labels, MaskedWords

CPU, CLS, SEP = torch.device("cpu"), 2, 3


def split(*sequences, labels=None):
    lengths = np.array([len(one) for one in sequences])
    return Sequences(
        np.concatenate([np.array(one, dtype=np.uint16) for one in sequences]),
        starts=np.cumsum([0, *lengths[:-1]]),
        lengths=lengths,
        labels=np.array(labels or [0] * len(sequences)),
    )


PAIRS = split([CLS, 7, 8, SEP, 9, SEP], [CLS, 7, SEP], [CLS, SEP, SEP], [CLS] + [5] * 9 + [SEP], labels=[0, 1, 2, 1])


def read(of, *samples):
    [batch] = of.batches([torch.tensor(samples, dtype=torch.int64)], CPU, 0)
    return batch


def test_a_batch_is_as_long_as_its_longest_sequence_and_on_a_gpu_a_multiple_of_8_of_at_most_the_longest_of_all():
    assert [tuple(read(PAIRS, *samples)["tokens"].shape) for samples in ([1], [0, 1, 2], [3], [])] == [
        (1, 3),
        (3, 6),
        (1, 11),
        (0, 1),
    ]
    on_gpu = [PAIRS._read(torch.tensor(samples), 8)["tokens"].shape[1] for samples in ([1], [0, 1], [3, 1])]
    assert on_gpu == [8, 8, 11]
    assert read(PAIRS, 1, 0)["tokens"].tolist() == [[CLS, 7, SEP, 0, 0, 0], [CLS, 7, 8, SEP, 9, SEP]]
    assert read(PAIRS, 1, 0)["labels"].tolist() == [1, 0]


def test_the_second_text_of_a_pair_has_another_type_and_what_fills_up_is_masked():
    batch = Labels(PAIRS.lengths, classes=3, end=SEP).prepare(read(PAIRS, 0, 1, 2), torch.arange(3), 0)
    assert batch["types"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6, [0, 0, 1, 0, 0, 0]]
    assert batch["mask"].sum(1).tolist() == [6, 3, 3]
    alike = Labels(PAIRS.lengths, classes=3, end=SEP).prepare(read(PAIRS, 0, 0), torch.tensor([0, 0]), 0)
    assert alike["mask"].shape == (2, 0)  # nothing fills up
    assert alike["types"].tolist() == [[0, 0, 0, 0, 1, 1]] * 2


@pytest.mark.parametrize("classes", [2, 5])
def test_f1_is_that_of_the_second_label_or_the_mean_over_more(classes):
    generator = torch.Generator().manual_seed(0)
    labels, guessed = torch.randint(0, classes, (2, 60), generator=generator)
    if classes > 2:
        labels[labels == 4], guessed[guessed == 4] = 3, 3  # a label that does not occur
    logits = torch.nn.functional.one_hot(guessed, classes).float()
    task = Labels(torch.ones(60), classes=classes, end=SEP)
    sums = []
    for part in torch.arange(60).split(17):
        batch = {"tokens": part, "types": part, "mask": part, "labels": labels[part]}
        sums.append(task.loss(lambda tokens, *_: logits[tokens], batch, training=False))
    names, values = total(sums)
    metrics = task.metrics(dict(zip(names, values.tolist(), strict=True)))
    f1 = []
    for label in [1] if classes == 2 else range(5):
        hits = ((labels == label) & (guessed == label)).sum().item()
        named = (labels == label).sum().item() + (guessed == label).sum().item()
        f1 += [2 * hits / named] if named else []
    assert metrics["f1"] == pytest.approx(sum(f1) / len(f1))
    assert metrics["accuracy"] == pytest.approx((labels == guessed).float().mean().item())
    assert metrics["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())


def test_masked_words_weigh_as_many_as_they_are_and_counts_are_known_before():
    texts, both = split([CLS] + [5] * 10 + [SEP], [CLS, 7, SEP]), torch.arange(2)  # two words, and one
    task = MaskedWords(texts.lengths, seed=0, mask_id=4, vocabulary=20)
    batch = task.prepare(read(texts, 0, 1), both, 0)
    sums = task.loss(lambda *inputs: torch.zeros(len(inputs[3]), 20), batch, training=True)
    assert sums.count.item() == task.counts(both).sum().item() == 3
    assert sums.loss.item() == pytest.approx(3 * math.log(20))
    assert task.metrics({"loss": sums.loss.item(), "count": 3, "right": 0})["perplexity"] == pytest.approx(20)


def test_a_rank_without_a_sequence_has_sums_of_nothing():
    for task in (
        Labels(PAIRS.lengths, classes=3, end=SEP),
        MaskedWords(PAIRS.lengths, seed=0, mask_id=4, vocabulary=20),
    ):
        batch = task.prepare(read(PAIRS), torch.arange(0), 0)
        sums = task.loss(lambda *_: torch.zeros(0, 20, requires_grad=True), batch, training=True)
        assert (sums.loss.item(), sums.count.item()) == (0, 0)
        sums.loss.backward()


def test_metrics_have_their_names_before_anything_was_counted():
    task = MaskedWords(PAIRS.lengths, seed=0, mask_id=4, vocabulary=20)
    assert list(metrics_of(task, {})) == ["loss", "perplexity", "accuracy"]
    assert math.isfinite(task.metrics({"loss": 1e9, "count": 1.0, "right": 0.0})["perplexity"])
    assert math.isnan(task.metrics({"loss": math.nan, "count": 1.0, "right": 0.0})["perplexity"])
    labels = Labels(PAIRS.lengths, classes=3, end=SEP)
    assert list(metrics_of(labels, {})) == ["loss", "accuracy", "f1"]


def test_a_test_in_words():
    labels = Labels(PAIRS.lengths, classes=3, end=SEP)
    assert labels.format_metrics({"loss": 1.0, "accuracy": 0.9, "f1": 0.5}) == "accuracy 90.00%, F1 0.500"
    words = MaskedWords(PAIRS.lengths, seed=0, mask_id=4, vocabulary=20)
    metrics = {"loss": 1.0, "perplexity": 72.04, "accuracy": 0.32}
    assert words.format_metrics(metrics) == "perplexity 72.0, accuracy 32.00%"


@pytest.mark.parametrize("task", [Labels, MaskedWords])
def test_what_helps_a_slow_input_are_options_of_texts(task):
    named = {word.rstrip(",)") for text in task.remedies.values() for word in text.split() if word.startswith("--")}
    assert task.remedies.keys() == set(INPUT)
    assert named <= {command_line.option(field.name) for field in fields(BertSettings)}
    assert not named & {"--workers", "--augment"}
