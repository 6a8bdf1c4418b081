"""Micro-batches that the first stage reads for all stages, and sends to them."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.core.host_copies import copy_to_device, copy_to_host
from hvdtrain.core.task import Batch, Task
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.stages.stage import Stage, blocks_of_stage


class Samples:
    """The samples of a replica at one stage.

    A stage with declared uses of its blocks and loss receives those tensors from the first stage, with the shapes of
    the rest; any other stage reads the samples itself.
    """

    def __init__(self, comm: Comm, stage: Stage) -> None:
        self._replica, self._stage = comm.replica, stage
        self._sent: list[tuple[Any, Any]] = []  # requests, and the bytes that they read

    def of(self, task: Task, read: Callable[[], Batch], device: torch.device) -> Batch:
        """Return the next micro-batch; tensors that this stage does not use are on meta. `read` reads all of it."""
        if self._stage.index > 0 and self._uses(task, self._stage.index) is not None:
            return self._receive(device)
        batch = read()
        if self._stage.index == 0:
            for other in range(1, len(self._stage.starts)):
                self._send(task, batch, other)
        return batch

    def finish(self) -> None:
        """Wait until the other stages have received everything."""
        for request, _ in self._sent:
            self._members.wait(request)
        self._sent.clear()

    @property
    def _members(self) -> MpiMembers:
        assert isinstance(self._replica, MpiMembers)
        return self._replica

    def _uses(self, task: Task, stage: int) -> tuple[frozenset[int], frozenset[str]] | None:
        """Return the indexes of inputs and the names of targets that a stage uses; None if it may use all."""
        places = [block.uses for block in blocks_of_stage(self._stage.blocks, self._stage.starts, stage)]
        targets = task.targets if stage == len(self._stage.starts) - 1 else ()
        if targets is None or None in places:
            return None
        return frozenset[int]().union(*(one for one in places if one is not None)), frozenset(targets)

    def _send(self, task: Task, batch: Batch, stage: int) -> None:
        used = self._uses(task, stage)
        if used is None:
            return
        places, targets = used
        inputs = task.inputs(batch)
        is_sent = {
            name: name in targets or any(inputs[place] is tensor for place in places) for name, tensor in batch.items()
        }
        facts = [[name, list(tensor.shape), str(tensor.dtype), is_sent[name]] for name, tensor in batch.items()]
        header = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        copies = copy_to_host([tensor for name, tensor in batch.items() if is_sent[name]])
        values = [tensor.flatten().view(torch.uint8).numpy() for tensor in copies]
        content = np.concatenate([np.array([len(header)]).view(np.uint8), header, *values])
        self._sent.append((self._members.send(content, stage), content))

    def _receive(self, device: torch.device) -> Batch:
        content, batch = torch.from_numpy(self._members.receive(0)), dict[str, Tensor]()
        arrived = copy_to_device(content, device)
        start = 8 + int(content[:8].view(torch.int64))
        for name, shape, dtype, is_sent in json.loads(content[8:start].numpy().tobytes()):
            batch[name] = torch.empty(
                shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device if is_sent else "meta"
            )
            if is_sent:
                end = start + batch[name].nbytes
                batch[name].flatten().view(torch.uint8).copy_(arrived[start:end])
                start = end
        return batch
