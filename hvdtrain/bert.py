"""Train a BERT with Horovod.

    python -m hvdtrain.bert                                                  one process: diagnoses to their chapters
    horovodrun -np 2 python -m hvdtrain.bert --task mlm                      two ranks: masked words of the same texts
    mpirun -np 8 python -m hvdtrain.bert --recipe finetune --pretrained bert-base-uncased --data glue --data-dir SST-2
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.bert --recipe pretrain --data-dir texts --max-steps 7038

The result is written to runs/bert/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import hvdtrain
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.settings import RECIPES, BertSettings, of_steps, resolve

if TYPE_CHECKING:
    from hvdtrain.tasks.text.model import Bert
    from hvdtrain.tasks.text.pretrained import Pretrained
    from hvdtrain.tasks.text.tokens import Texts


def main(run: hvdtrain.Run[BertSettings]) -> None:
    """Train on this rank's part of the texts; Horovod sums the gradients of all ranks at each step."""
    # These imports load torch, which takes seconds; the ranks have agreed on their settings by now.
    from hvdtrain.loop.feed.order import batch_sizes
    from hvdtrain.tasks.text import data
    from hvdtrain.tasks.text import model as models
    from hvdtrain.tasks.text.export import export_on_all
    from hvdtrain.tasks.text.pretrained import pretrained_on_all
    from hvdtrain.tasks.text.task import text_task
    from hvdtrain.tasks.text.weights import load_pretrained

    ranks, settings = run.ranks, run.settings
    pretrained = None if settings.pretrained is None else pretrained_on_all(ranks, settings.pretrained)
    if pretrained is not None:
        settings = replace(settings, model=pretrained.source)
    run.agree(lambda: require_positions(run, settings, pretrained))
    texts = data.load_on_all(ranks, settings, pretrained)
    sizes = run.agree(lambda: batch_sizes(settings, samples=len(texts.train), ranks=ranks.data.size))
    run.settings = settings = of_steps(settings, steps_per_epoch=sizes.steps_per_epoch)

    def make() -> Bert:
        model = build(settings, texts, pretrained)
        if pretrained is not None:
            load_pretrained(model, pretrained, texts.labels)
        if settings.freeze_embeddings:
            models.freeze_embeddings(model)
        return model

    def export(training: hvdtrain.Training) -> None:
        if settings.export is None:
            return
        weights = training.gather_model()

        def make_full_model() -> Bert:
            model = build(settings, texts, pretrained)
            model.load_state_dict(weights)
            return model

        export_on_all(ranks, settings.export, make_full_model, texts)

    training = run.training(
        make,
        text_task(settings, texts),
        train=texts.train,
        test=texts.test,
        cuts=lambda model: hvdtrain.Cuts(blocks=models.blocks(model), split_layers=models.slice_layers),
        max_steps=settings.max_steps,
        about={
            "vocabulary": len(texts.vocabulary.tokens),
            "classes": len(texts.labels),
            "cut_texts": texts.cut_count,
            "unknown_tokens": texts.unknown_share,
        },
        at_end=export,
    )
    training.say(*(pretrained.remarks if pretrained else ()), *texts.remarks)
    for _ in training:  # reports and epochs, which are recorded in the run folder
        pass


def require_positions(run: hvdtrain.Run[BertSettings], settings: BertSettings, pretrained: Pretrained | None) -> None:
    """Raise BadInput if the model has too few positions or cannot be sliced, or if the export cannot be written."""
    from hvdtrain.checkpoint.run_folder import has_checkpoints
    from hvdtrain.tasks.text.export import require_exportable
    from hvdtrain.tasks.text.model import require_slices, sizes_of

    sizes = sizes_of(settings.model, vocabulary=settings.vocab_size) if pretrained is None else pretrained.sizes
    if pretrained is not None:
        pretrained.require_positions(settings.max_tokens)
    elif settings.max_tokens > sizes.positions:
        fewer = f"{settings.model} has {sizes.positions} positions. Pass at most {sizes.positions}."
        raise BadInput(f"--max-tokens {settings.max_tokens}: {fewer}")
    require_slices(sizes, settings.tensor)
    if settings.export is not None and run.ranks.rank == 0:
        experiment, name = settings.run_names
        is_resumed = has_checkpoints(settings.runs_dir / experiment, name)  # its own export may exist
        require_exportable(settings.export, runs=settings.runs_dir, replace=settings.overwrite or is_resumed)


def build(settings: BertSettings, texts: Texts, pretrained: Pretrained | None) -> Bert:
    """Build the model of the settings, or one with the sizes of the pretrained model, with a head for the task."""
    from hvdtrain.tasks.text.model import BertForClassification, BertForMaskedLM, sizes_of

    words = len(texts.vocabulary.tokens)
    sizes = sizes_of(settings.model, vocabulary=words) if pretrained is None else pretrained.sizes
    if settings.dropout is not None:
        sizes = replace(sizes, dropout=settings.dropout, attention_dropout=None, classifier_dropout=None)
    return BertForMaskedLM(sizes) if settings.task == "mlm" else BertForClassification(sizes, len(texts.labels))


if __name__ == "__main__":
    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)
