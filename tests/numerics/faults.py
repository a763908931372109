"""Puts one wrong number into the result of one op, below everything that watches the program."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_plugin.numerics.op import Call
from amp_plugin.numerics.values import unwatched


@dataclass(frozen=True)
class Target:
    """A call of an op whose result can be given a fault."""

    number: int
    op: str
    direction: str


class Faults(TorchDispatchMode):
    """Counts the calls of ops that compute numbers.

    Writes ``value`` into one element of the result of call ``at``.
    """

    def __init__(self, at: int = -1, value: float = math.nan, element: int = 0) -> None:
        super().__init__()
        self.at, self.value, self.element = at, value, element
        self.targets: list[Target] = []
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = Call(func, args, kwargs, None)
        output, traits = func(*args, **kwargs), call.traits
        if traits.is_view or traits.is_unwritten or traits.is_collective:
            return output
        results = [m.tensor for m in call.made(output) if not m.is_discrete and m.tensor.numel()]
        results = [t for t in results if t.layout is torch.strided]
        results = [t for t in results if not t._is_zerotensor()]  # it has no memory to write to
        if not results:
            return output
        backward = torch._C._current_autograd_node() is not None
        target = Target(self.calls, traits.name, "backward" if backward else "forward")
        self.targets.append(target)
        if self.calls == self.at:
            with unwatched():
                self.spoil(results[0])
        self.calls += 1
        return output

    def spoil(self, tensor: torch.Tensor) -> None:
        index = tuple(torch.unravel_index(torch.tensor(self.element % tensor.numel()), tensor.shape))
        tensor[index] = self.value


def program(op, sample, dtype=None):
    """Return a function that runs a sample of torch's op database forward and backward, on new leaf tensors."""

    def run() -> None:
        torch.manual_seed(0)

        def fresh(leaf):
            is_tensor = isinstance(leaf, torch.Tensor)
            return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf

        leaf, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
        outputs = [t for t in tree_leaves(op(leaf, *args, **kwargs)) if isinstance(t, torch.Tensor)]
        losses = [(t.abs() if t.is_complex() else t).sum() for t in outputs if t.requires_grad]
        if losses:
            sum(losses).backward()

    return run


def samples_of(info, count, dtype=torch.float32):
    """Return the first samples of an op.

    ``info.sample_inputs()`` is not used: it inspects the stack, which is slow under pytest.
    """
    return list(itertools.islice(info.sample_inputs_func(info, "cpu", dtype, info.supports_autograd), count))
