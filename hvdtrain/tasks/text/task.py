"""Tasks on texts: labels, or masked words. N sequences of a batch, L tokens, M masked, K labels."""

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.core.phases import Phase
from hvdtrain.core.task import Batch, Model, Sums, Task, Totals
from hvdtrain.tasks.text.masks import count_masked, mask_tokens
from hvdtrain.tasks.text.settings import BertSettings
from hvdtrain.tasks.text.tokens import Texts
from hvdtrain.tasks.text.vocabulary import END, MASK

_REMEDIES: Mapping[Phase, str] = {
    "read": "cores with nothing else to do, or the folder of tokens (XDG_CACHE_HOME) on a faster disk",
    "augment": "a smaller --max-tokens",
    "to_device": "larger batches, or a smaller --max-tokens",
}
_MOST_LOSS = 700.0  # exp overflows above this


class _TextTask(Task):
    """The common part of both tasks: sequences cost time by their lengths."""

    remedies = _REMEDIES

    def __init__(self, lengths: Tensor) -> None:
        self._lengths = lengths  # (S,) of the training split

    def cost(self, samples: Tensor) -> Tensor:
        return self._lengths[samples]


class Labels(_TextTask):
    """Predicts a label for each sequence or pair. `f1` is that of the second of two, or a mean of those that occur."""

    best = "accuracy"
    higher_is_better = True
    names = ("f1",)

    def __init__(self, lengths: Tensor, *, classes: int, end: int) -> None:
        """Create the task; `lengths` (S,) are those of the training split, `end` is the number of [SEP]."""
        super().__init__(lengths)
        self._classes, self._end = classes, end

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        tokens = raw["tokens"]
        mask = token_mask(raw["lengths"], tokens)
        ends = tokens == self._end
        types = (ends.cumsum(1) - ends.long()) > 0  # 1 after the first [SEP]
        if mask.shape[1]:
            types &= mask
        return {"tokens": tokens, "types": types.long(), "mask": mask, "labels": raw["labels"]}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch["tokens"], batch["types"], batch["mask"]

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        labels = batch["labels"]
        logits = model(*self.inputs(batch)).float()  # (N, K)
        predictions = logits.argmax(1)
        is_right = predictions == labels
        loss = F.cross_entropy(logits, labels, reduction="sum")
        zeros = torch.zeros(self._classes, dtype=torch.float64, device=labels.device)
        weights = torch.ones_like(labels, dtype=torch.float64)
        # The confusion matrix's diagonal and its two margins: F1 needs nothing else.
        by_label = {
            "right_of": zeros.index_add(0, labels, is_right.double()),
            "guessed": zeros.index_add(0, predictions, weights),
            "labelled": zeros.index_add(0, labels, weights),
        }
        sums = {
            f"{name}_{label}": value for name, sums in by_label.items() for label, value in enumerate(sums.unbind())
        }
        count = torch.full_like(loss, len(labels))
        return Sums(loss=loss, count=count, more={"right": is_right.sum(), **sums})

    def metrics(self, totals: Totals) -> dict[str, float]:
        count = totals["count"]
        scores = [self._f1(totals, label) for label in range(self._classes)]
        occurring = [score for score in scores if score is not None]
        f1 = scores[1] or 0.0 if self._classes == 2 else sum(occurring) / len(occurring)
        return {"loss": totals["loss"] / count, "accuracy": totals["right"] / count, "f1": f1}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        return f"accuracy {metrics['accuracy']:.2%}, F1 {metrics['f1']:.3f}"

    def _f1(self, totals: Totals, label: int) -> float | None:
        """Return twice the correct predictions over all predictions and labels of a class; None if it has neither."""
        total = totals[f"guessed_{label}"] + totals[f"labelled_{label}"]
        return 2 * totals[f"right_of_{label}"] / total if total else None


class MaskedWords(_TextTask):
    """Predicts masked words; the weight of a sequence is its number of masked words."""

    best = "perplexity"
    names = ("accuracy",)

    def __init__(self, lengths: Tensor, *, seed: int, mask_id: int, vocabulary: int) -> None:
        """Create the task; `lengths` (S,) are those of the training split."""
        super().__init__(lengths)
        self._mask = partial(mask_tokens, seed=seed, mask_id=mask_id, vocabulary=vocabulary)

    def counts(self, samples: Tensor) -> Tensor:
        return count_masked(self._lengths[samples]).double()

    def prepare(self, raw: Batch, samples: Tensor, epoch: int | None) -> Batch:
        masked = self._mask(raw["tokens"], raw["lengths"], samples, epoch=epoch)
        mask = token_mask(raw["lengths"], masked.tokens)
        return {**vars(masked), "types": torch.zeros_like(masked.tokens), "mask": mask}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch["tokens"], batch["types"], batch["mask"], batch["places"]

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        targets = batch["targets"]
        logits = model(*self.inputs(batch)).float()  # (M, V)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        count = torch.full_like(loss, len(targets))
        return Sums(loss=loss, count=count, more={"right": (logits.argmax(1) == targets).sum()})

    def metrics(self, totals: Totals) -> dict[str, float]:
        count = totals["count"]
        loss = totals["loss"] / count
        return {"loss": loss, "perplexity": math.exp(min(loss, _MOST_LOSS)), "accuracy": totals["right"] / count}

    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        return f"perplexity {metrics['perplexity']:.1f}, accuracy {metrics['accuracy']:.2%}"


def token_mask(lengths: Tensor, tokens: Tensor) -> Tensor:
    """Return a mask (N, L), True at the tokens of sequences of these lengths (N,); (N, 0) without padding.

    Attention without a mask may use faster kernels. The lengths are on the host, so nothing waits for the device.
    """
    count, longest = tokens.shape
    if bool((lengths == longest).all()):
        return torch.empty(count, 0, dtype=torch.bool, device=tokens.device)
    return torch.arange(longest, device=tokens.device) < lengths.to(tokens.device, non_blocking=True)[:, None]


TextTask = Labels | MaskedWords


def text_task(config: BertSettings, texts: Texts) -> TextTask:
    """Return the task that the settings select."""
    lengths, vocabulary = texts.train.lengths, texts.vocabulary
    if config.task == "mlm":
        size = len(vocabulary.tokens)
        return MaskedWords(lengths, seed=config.seed, mask_id=vocabulary.id(MASK), vocabulary=size)
    return Labels(lengths, classes=len(texts.labels), end=vocabulary.id(END))
