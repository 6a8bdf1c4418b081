"""Small BERTs, batches for them and their folders, put together in one place."""

import torch

from hvdtrain.tasks.text.export import export
from hvdtrain.tasks.text.model import BertForClassification, BertForMaskedLM, BertSizes
from hvdtrain.tasks.text.vocabulary import SPECIALS, Vocabulary

VOCABULARY = (*SPECIALS, "a", "fever", "fracture", "of", "the", "left", "eye", "##s", "Fever", "##ish")
SIZES = BertSizes(
    vocabulary=len(VOCABULARY),
    width=32,
    layers=2,
    heads=4,
    intermediate=48,
    positions=12,
    dropout=0.0,
    initializer_range=0.3,  # so that logits differ
)
LABELS = ("eye", "bone", "other")
LENGTHS = (9, 4, 1)


def batch(longest=9):
    """Three sequences of 9, 4 and 1 tokens, the first two pairs: tokens, types and mask (3, longest)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(SPECIALS), len(VOCABULARY), (3, longest), generator=generator)
    types = (torch.arange(longest) >= 3).long().expand(3, -1)
    mask = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    return tokens.where(mask, 0), types.where(mask, 0), mask


def masked_lm(seed=0, sizes=SIZES):
    torch.manual_seed(seed)
    return unlike(BertForMaskedLM(sizes))


def classifier(seed=0, sizes=SIZES, classes=3):
    torch.manual_seed(seed)
    return unlike(BertForClassification(sizes, classes))


def unlike(model):
    """Its biases and norms are random too, so that none is taken for another; it is evaluated."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    return model.eval()


def saved(folder, model, *, lower_case=True, labels=()):
    """The folder as `export` leaves it."""
    export(folder, model, vocabulary=Vocabulary(tokens=VOCABULARY, lower_case=lower_case), labels=labels)
    return folder
