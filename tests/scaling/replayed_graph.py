"""A CUDA graph, imitated on the CPU: the ops of a block are recorded and undone, and each replay runs them
again.

Like a real replay, it runs no Python, writes its results into the tensors of the capture, and changes no
version counter. Memory that the capture allocated has meaningless values before the first replay.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor):
    return tensor.untyped_storage()._cdata


class ReplayedGraph(TorchDispatchMode):
    """Captures the ops inside ``with``. The scaler asks ``capturing`` whether a capture is running."""

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._found, self._made = [], {}, set()
        self._active = False

    def capturing(self, device: torch.device) -> bool:
        return self._active

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if _memory(tensor) not in self._made and _memory(tensor) not in self._found:
                self._found[_memory(tensor)] = (tensor, tensor.detach().clone())
        out = func(*args, **kwargs)
        self._made |= {_memory(tensor) for tensor in _tensors(out)} - self._found.keys()
        self._calls.append((func, args, kwargs, out))
        return out

    def __enter__(self):
        self._active = True
        return super().__enter__()

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        self._active = False
        with torch.no_grad():
            for tensor, before in self._found.values():
                tensor.copy_(before)
            for *_, out in self._calls:
                for tensor in _tensors(out):
                    if _memory(tensor) in self._made:
                        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 77)

    @torch.no_grad()
    def replay(self) -> None:
        found = tuple(tensor for tensor, _ in self._found.values())
        versions = tuple(tensor._version for tensor in found)
        for func, args, kwargs, out in self._calls:
            new = func(*args, **kwargs)
            for old, value in zip(_tensors(out), _tensors(new), strict=True):
                if old.data_ptr() != value.data_ptr():
                    old.detach().copy_(value)
        torch._C._autograd._unsafe_set_version_counter(found, versions)
