"""Our step over masked words, with the masks that it draws.

mpirun -np 2 python bench/our_masked_words.py OUT --model bert_tiny --batch 32 --tokens 64 --steps 20
"""

import dataclasses

from sequences import MASK, VOCABULARY, sequences
from workload import BATCHES, LR, WARMUP_STEPS, StepClock, answer, asked, fast_kernels

from hvdtrain.core.order import BatchSizes
from hvdtrain.core.step import Pending
from hvdtrain.program.assembly import step_of_run
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import choose_device, share_cores
from hvdtrain.settings.join import horovod_fusion_mb
from hvdtrain.text.config import tiny
from hvdtrain.text.model import BertForMaskedLM, sizes_of
from hvdtrain.text.task import MaskedWords


def main() -> None:
    chosen = asked()
    fast_kernels()
    plain = {"precision": chosen.precision, "compile": chosen.compile, "compression": "none", "clip_norm": None}
    config = dataclasses.replace(tiny(), task="mlm", **plain)
    comm = connect(fusion_threshold_mb=horovod_fusion_mb(config), cycle_time_ms=config.cycle_time_ms)
    share_cores(comm)
    device = choose_device(comm)
    comm.start()
    made = [sequences(chosen, device, BATCHES * comm.rank + number) for number in range(BATCHES)]
    task = MaskedWords(made[0].lengths, seed=0, mask_id=MASK, vocabulary=VOCABULARY)
    count = comm.size * task.counts(made[0].samples).sum().item()  # all batches have the same lengths
    model = BertForMaskedLM(sizes_of(chosen.model, vocabulary=VOCABULARY)).to(device)
    comm.data.broadcast_(model)
    global_batch = chosen.batch * comm.size
    sizes = BatchSizes(micro_batch=chosen.batch, global_batch=global_batch, steps_per_epoch=chosen.steps)
    step = step_of_run(comm, config, model, task, device, lr=LR, sizes=sizes)
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
