"""Backward passes of tensors without a device: autograd's own nodes, called one by one.

torch's engine would request streams from a driver before it calls them. The work between two nodes follows torch's
sources (engine.cpp, input_buffer.cpp, accumulate_grad.h): nodes run in the order of their numbers, gradients get the
type and shape of their tensors, saved tensors are released. Hooks of tensors and nodes are not called.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Backward:
    """Runs backward from losses, and tracks what the forward passes have saved."""

    def __init__(self) -> None:
        self._unpacked: list[_Saved] = []  # by the current node
        self._runs = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let forward passes save tensors in such a way that a backward pass can release them."""
        with saved_tensors_hooks(_Saved, self._unpack):
            yield

    def _unpack(self, saved: "_Saved") -> Tensor:
        self._unpacked.append(saved)
        return saved.tensor

    @torch.no_grad()
    def run(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Add to the gradients of all parameters; the graph can be used only once."""
        self._runs += 1
        task_id, torch._C._current_graph_task_id = torch._C._current_graph_task_id, lambda: self._runs
        try:  # a checkpoint recomputes its block once for each task
            self._run(loss, gradient)
        finally:
            torch._C._current_graph_task_id = task_id

    def _run(self, loss: Tensor, gradient: Tensor | None) -> None:
        root: Any = loss.grad_fn
        waiting = _count_edges(root)
        gradients: dict[Any, list[Tensor | None]] = {root: [torch.ones_like(loss) if gradient is None else gradient]}
        order = itertools.count()
        ready = [(-root._sequence_nr(), next(order), root)]
        while ready:
            _, _, node = heapq.heappop(ready)
            received = gradients.pop(node)
            _send(node, self._call(node, received), gradients)
            for following, _ in node.next_functions:
                if following is not None:
                    waiting[following] -= 1
                    if not waiting[following]:
                        gradients.setdefault(following, [None] * len(following._input_metadata))
                        heapq.heappush(ready, (-following._sequence_nr(), next(order), following))

    def _call(self, node: Any, received: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        if hasattr(node, "variable"):
            if received[0] is not None:
                _accumulate(node.variable, received[0])
            return ()
        outputs = getattr(node, "apply", node)(*received)  # apply of a torch.autograd.Function
        for saved in self._unpacked:
            saved.release()
        self._unpacked.clear()
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Saved:
    """A tensor that a node has saved."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    @property
    def tensor(self) -> Tensor:
        assert self._tensor is not None, "a graph is gone backward through once"
        return self._tensor

    def release(self) -> None:
        """Release the tensor, as the engine does after each node."""
        self._tensor = None


def _count_edges(root: Any) -> Counter[Any]:
    """Count the edges that lead to each node."""
    edges: Counter[Any] = Counter()
    to_visit, known = deque([root]), {root}
    while to_visit:
        for following, _ in to_visit.popleft().next_functions:
            if following is not None:
                edges[following] += 1
                if following not in known:
                    known.add(following)
                    to_visit.append(following)
    return edges


def _send(node: Any, outputs: tuple[Tensor | None, ...], gradients: dict[Any, list[Tensor | None]]) -> None:
    """Add a node's outputs to the gradients at the ends of its edges."""
    for (following, place), output in zip(node.next_functions, outputs, strict=False):
        if following is None or output is None:
            continue
        slots = gradients.setdefault(following, [None] * len(following._input_metadata))
        fitting = _fit(output, following._input_metadata[place])
        before = slots[place]
        slots[place] = fitting if before is None else before + fitting


def _fit(gradient: Tensor, metadata: Any) -> Tensor:
    """Convert the gradient to the shape and type of its tensor."""
    if gradient.shape != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate like AccumulateGrad: take over a first gradient with the parameter's memory layout, else copy it."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient.detach()
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
