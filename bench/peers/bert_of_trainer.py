"""A BERT by transformers' Trainer, from scratch: labels of texts, or their masked words.

    torchrun --nproc-per-node 2 bench/peers/bert_of_trainer.py --folder TEXTS --task mlm --output_dir out

TEXTS has vocab.txt, and train.json and test.json with a list of {"input_ids": [2, 17, 3], "labels": 4}.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Texts:
    folder: str
    task: str = "classify"
    layers: int = 2
    width: int = 128
    initializer_range: float = 0.06


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    return {"accuracy": float((prediction.predictions == labels)[labels != -100].mean())}


def trainer_of(texts: Texts, arguments: TrainingArguments) -> Trainer:
    set_seed(arguments.seed)
    folder = Path(texts.folder)
    train, test = (json.loads((folder / f"{name}.json").read_text()) for name in ("train", "test"))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=texts.width,
        num_hidden_layers=texts.layers,
        num_attention_heads=texts.width // 64,
        intermediate_size=4 * texts.width,
        initializer_range=texts.initializer_range,
        num_labels=1 + max(row["labels"] for row in train),
    )
    if texts.task == "mlm":
        model, collator = BertForMaskedLM(config), DataCollatorForLanguageModeling(tokenizer)
        train, test = ([{"input_ids": row["input_ids"]} for row in rows] for rows in (train, test))
    else:
        model, collator = BertForSequenceClassification(config), DataCollatorWithPadding(tokenizer)
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )


if __name__ == "__main__":
    texts, arguments = HfArgumentParser((Texts, TrainingArguments)).parse_args_into_dataclasses()
    trainer = trainer_of(texts, arguments)
    trained = trainer.train().metrics
    result = {"samples_per_s": trained["train_samples_per_second"], **trainer.evaluate()}
    if arguments.process_index == 0:
        (Path(arguments.output_dir) / "result.json").write_text(json.dumps(result))
