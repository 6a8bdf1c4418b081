"""transformers' BERT in its Trainer, as DDP.

PYTHONPATH=bench torchrun --nproc-per-node 2 bench/peers/trainer.py OUT --model bert_tiny --batch 32 --steps 20
"""

import os
import tempfile

import torch
from sequences import for_transformers, sequences, their_bert
from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import BATCHES, LR, WARMUP_STEPS, StepClock, answer, asked, fast_kernels

chosen = asked()
fast_kernels()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
clock = StepClock(device)


class Marks(TrainerCallback):
    """Marks the begin of each step."""

    def on_step_begin(self, *_: object, **__: object) -> None:
        clock.mark()


def batches() -> list[dict[str, torch.Tensor]]:
    """As many as all steps of all ranks take, the same few again and again, ready as those of ours are."""
    made = [for_transformers(sequences(chosen, torch.device("cpu"), seed)) for seed in range(BATCHES)]
    times: int = int(os.environ["WORLD_SIZE"]) * (WARMUP_STEPS + chosen.steps + 1) // BATCHES + 1
    return made * times


def the_one(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A sample is a whole batch: there is nothing to collate."""
    return batch[0]


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=WARMUP_STEPS + chosen.steps + 1,
        learning_rate=LR,
        optim="adamw_torch_fused",
        max_grad_norm=0.0,
        bf16=chosen.precision == "bf16",
        torch_compile=chosen.compile,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not on_gpu,
    )
    Trainer(
        model=their_bert(chosen.model),
        args=arguments,
        train_dataset=batches(),
        data_collator=the_one,
        callbacks=[Marks()],
    ).train()
if os.environ["RANK"] == "0":
    answer(chosen.out, clock, device)
