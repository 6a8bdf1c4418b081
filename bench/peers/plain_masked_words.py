"""transformers' BERT in the shortest loop.

PYTHONPATH=bench python bench/peers/plain_masked_words.py OUT --model bert_tiny --batch 32 --tokens 64 --steps 20
"""

import torch
from sequences import for_transformers, sequences, their_bert
from workload import BATCHES, LR, WARMUP_STEPS, StepClock, answer, asked, autocast, fast_kernels

chosen = asked()
fast_kernels()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = their_bert(chosen.model).to(device)
if chosen.compile:
    model.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
batches = [for_transformers(sequences(chosen, device, seed)) for seed in range(BATCHES)]
model.train()
clock = StepClock(device)
for number in range(WARMUP_STEPS + chosen.steps):
    clock.mark()
    with autocast(chosen, device):
        loss = model(**batches[number % BATCHES]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
clock.mark()
answer(chosen.out, clock, device)
