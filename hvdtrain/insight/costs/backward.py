"""Backward passes of tensors without a device: autograd's own nodes, called in torch's order.

torch's engine would request streams from a driver before it calls them. Hooks of tensors and nodes are not called.
"""

from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Backward(saved_tensors_hooks):
    """Runs backward from losses; as a context, lets forward passes save tensors so that `run` can release them."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: [tensor], self._unpack)
        self._unpacked: list[list[Tensor]] = []  # by the current node
        self._runs = 0

    def _unpack(self, saved: list[Tensor]) -> Tensor:
        self._unpacked.append(saved)
        return saved[0]

    @torch.no_grad()
    def run(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Add to the gradients of all parameters; the graph can be used only once."""
        self._runs += 1
        gradients: dict[Any, list[Tensor | None]] = {
            loss.grad_fn: [torch.ones_like(loss) if gradient is None else gradient]
        }
        with patch.object(torch._C, "_current_graph_task_id", lambda: self._runs):  # checkpoints recompute once a task
            for node in _in_order(loss.grad_fn):
                if node in gradients:
                    _send(node, self._call(node, gradients.pop(node)), gradients)

    def _call(self, node: Any, received: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        outputs = getattr(node, "apply", node)(*received)  # apply of a torch.autograd.Function
        for saved in self._unpacked:
            saved.clear()
        self._unpacked.clear()
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _in_order(root: Any) -> Iterator[Any]:
    """Yield the nodes of a graph as torch's engine calls them, without those that accumulate gradients."""
    sorter, known, to_visit = TopologicalSorter[Any]({root: ()}), {root}, [root]
    while to_visit:
        node = to_visit.pop()
        following = {one for one, _ in node.next_functions if not (one is None or _is_leaf(one))}
        for one in following:
            sorter.add(one, node)
        to_visit += following - known
        known |= following
    sorter.prepare()
    ready = list[Any]()
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=lambda one: one._sequence_nr())
        node = ready.pop()
        yield node
        sorter.done(node)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _send(node: Any, outputs: tuple[Tensor | None, ...], gradients: dict[Any, list[Tensor | None]]) -> None:
    """Add a node's outputs, in the shape and type of their tensors, to the gradients at the ends of its edges."""
    for (following, place), output in zip(node.next_functions, outputs, strict=False):
        if following is None or output is None:
            continue
        metadata = following._input_metadata
        fitting, shape = output.to(metadata[place].dtype), torch.Size(metadata[place].shape)
        if fitting.shape != shape:
            fitting = fitting.sum_to_size(shape)
        if _is_leaf(following):
            parameter = following.variable
            parameter.grad = fitting.detach() if parameter.grad is None else parameter.grad.add_(fitting)
            continue
        slots = gradients.setdefault(following, [None] * len(metadata))
        before = slots[place]
        slots[place] = fitting if before is None else before + fitting
