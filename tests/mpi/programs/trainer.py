"""What a step of transformers' Trainer is, against the exact one; rank 0 writes steps.json into the folder it is given.

    trainer.py FOLDER --loss          Trainer with the loss of docs/how-to/from-hf-trainer.md, alone
    trainer.py FOLDER --horovod       docs/horovod_trainer.py
    trainer.py FOLDER --ends          the same, stopped early; what each rank has then: ends-<rank>.json

Both heads, each with several numbers of micro-batches: a dataset that is one global batch, a step of SGD with rate 1.
The exact step is the gradient of the mean loss per label. Of the Trainer's: how long it is, and its cosine.
"""

import itertools
import json
import os
import sys
from pathlib import Path

folder, how = Path(sys.argv[1]), sys.argv[2]
DOCS = Path(__file__).parents[3] / "docs"
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if how != "--loss":
    sys.path.insert(0, str(DOCS))
    from horovod_trainer import HorovodTrainer as Trainer
else:
    from transformers import Trainer

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    TrainingArguments,
)

HEADS = {"classification": BertForSequenceClassification, "masked words": BertForMaskedLM}
ACCUMULATE = (1, 4, 8) if ranks == 1 else (1, 4)
LABELS, WORDS, LONGEST, MICRO_BATCH, PASSED_OVER = 3, 50, 24, 4, -100


def model_of(head):
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": LONGEST, "num_labels": LABELS}
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)
    return HEADS[head](config)


def samples_of(head, count):
    """Sequences of unequal length, so that micro-batches have unequal numbers of masked words."""
    random = torch.Generator().manual_seed(1)
    made = []
    for length in torch.randint(4, LONGEST + 1, (count,), generator=random).tolist():
        tokens = torch.randint(5, WORDS, (LONGEST,), generator=random)
        mask = torch.arange(LONGEST) < length
        labels = torch.randint(0, LABELS, (), generator=random)
        if head == "masked words":
            drawn = torch.rand(LONGEST, generator=random).where(mask, 1.0)
            chosen = drawn.argsort().argsort() < max(1, round(0.15 * length))
            labels = torch.where(chosen, tokens, PASSED_OVER)
        made.append({"input_ids": tokens.where(mask, 0), "attention_mask": mask.long(), "labels": labels})
    return made


def loss_of_the_page():
    """mean_over_step, as it stands in docs/how-to/from-hf-trainer.md."""
    _, start, rest = (DOCS / "how-to/from-hf-trainer.md").read_text().partition("def mean_over_step(")
    names = {"torch": torch}
    exec(start + rest.partition("\n\n")[0], names)  # noqa: S102 (it is our own)
    return names["mean_over_step"]


def flat(model, of):
    return torch.cat([of(parameter).detach().flatten() for parameter in model.parameters()])


def exact_step(head, samples):
    model = model_of(head).train()
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    labels = batch.pop("labels").flatten()
    logits = model(**batch).logits
    functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels).backward()
    return flat(model, lambda parameter: -parameter.grad)


def trainers_step(head, samples, accumulate):
    model = model_of(head)
    before = flat(model, torch.clone)
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    loss = loss_of_the_page() if how == "--loss" else None
    Trainer(model=model, args=arguments, train_dataset=samples, compute_loss_func=loss).train()
    return flat(model, torch.clone) - before


def stopped_early():
    """Rank 0 finds each evaluation worse than the one before, the others each one better."""
    evaluations = itertools.count(1)
    samples = samples_of("classification", 8 * MICRO_BATCH)
    arguments = TrainingArguments(
        output_dir=str(folder / f"output-{rank}"),
        per_device_train_batch_size=1,
        max_steps=9,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model_of("classification"),
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:4],
        compute_metrics=lambda _: {"score": next(evaluations) * (-1.0 if rank == 0 else 1.0)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    trainer.save_model(str(folder / f"saved-{rank}"))
    facts = {"steps": trainer.state.global_step, "weights": flat(trainer.model, torch.clone).double().sum().item()}
    (folder / f"ends-{rank}.json").write_text(json.dumps(facts))


if how == "--ends":
    stopped_early()
    sys.exit()
found = []
for head in HEADS:
    for accumulate in ACCUMULATE:
        samples = samples_of(head, ranks * accumulate * MICRO_BATCH)
        exact, theirs = exact_step(head, samples), trainers_step(head, samples, accumulate)
        length = (theirs.norm() / exact.norm()).item()
        cosine = functional.cosine_similarity(theirs, exact, dim=0).item()
        found.append({"head": head, "ranks": ranks, "accumulate": accumulate, "length": length, "cosine": cosine})
if rank == 0:
    (folder / "steps.json").write_text(json.dumps(found))
