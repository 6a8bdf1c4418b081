"""Our step over masked words, with the masks that it draws.

mpirun -np 2 python bench/our_masked_words.py OUT --model bert_tiny --batch 32 --tokens 64 --steps 20
"""

import dataclasses

from jobs import job_of, ranks_of, step_of
from sequences import MASK, VOCABULARY, sequences
from workload import BATCHES, LR, WARMUP_STEPS, StepClock, answer, asked, fast_kernels

from hvdtrain.core.pending import Pending
from hvdtrain.feed.feed import Resident
from hvdtrain.ranks.device import choose_device
from hvdtrain.text.model import BertForMaskedLM, sizes_of
from hvdtrain.text.settings import tiny
from hvdtrain.text.task import MaskedWords


def main() -> None:
    chosen = asked()
    fast_kernels()
    plain = {"precision": chosen.precision, "compile": chosen.compile, "compression": "none", "clip_norm": None}
    batches = {"batch_size_per_rank": chosen.batch, "global_batch_size": None, "accumulate_steps": 1}
    config = dataclasses.replace(tiny(), task="mlm", **plain, **batches)
    comm = ranks_of(config)
    device = choose_device(comm)
    comm.start()
    made = [sequences(chosen, device, BATCHES * comm.rank + number) for number in range(BATCHES)]
    task = MaskedWords(made[0].lengths, seed=0, mask_id=MASK, vocabulary=VOCABULARY)
    count = comm.size * task.counts(made[0].samples).sum().item()  # all batches have the same lengths
    model = BertForMaskedLM(sizes_of(chosen.model, vocabulary=VOCABULARY))
    train = Resident(tokens=made[0].tokens, lengths=made[0].lengths)
    step = step_of(config, job_of(comm, config, device, model=model, task=task, train=train), lr=LR)
    model.train()
    clock = StepClock(device)
    before: Pending | None = None
    for number in range(WARMUP_STEPS + chosen.steps):
        clock.mark()
        batch = made[number % BATCHES]
        raw = {"tokens": batch.tokens, "lengths": batch.lengths}
        inputs = task.prepare(raw, batch.samples.to(device), number)
        pending = step([inputs], backward_passes=1, global_count=count, lr=LR)
        if before is not None:
            before.read()  # one step behind, as in a run
        before = pending
    clock.mark()
    if comm.rank == 0:
        answer(chosen.out, clock, device)


if __name__ == "__main__":
    main()
