"""One weight in 16 bits, and what makes it float32 again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class StoredWeight:
    """A parameter of a model in 16 bits, its rest, and the float32 master that an optimizer sees.

    Args:
        param: The model's parameter, bfloat16 or float16.
        rest: What makes it float32 again: its low half, int16; or the master itself, float32; or nothing.

    Attributes:
        param: As given; the same object for as long as the model has it.
        rest: As given; on the parameter's device from the next :meth:`settle` on.
        master: float32, of the parameter's shape. Its memory is there while an optimizer uses it, and
            always if it is the rest.
    """

    def __init__(self, param: Tensor, rest: Tensor) -> None:
        self.param = param
        self.rest = rest
        self.master = nn.Parameter(_master_data(param, rest))
        self._rest_is_loaded = False
        self._seen_version = param._version
        param.grad_dtype = torch.float32

    @property
    def is_written(self) -> bool:
        """Whether somebody else has written the parameter since :meth:`note_written`."""
        return self.param._version != self._seen_version and not self._rest_is_loaded

    def note_written(self) -> None:
        """Note that parameter and rest belong together."""
        self._seen_version = self.param._version
        self._rest_is_loaded = False

    def load_rest(self, rest: Tensor) -> None:
        """Take a rest whose parameter is loaded too, before or after it, until the next step."""
        self.rest.copy_(rest)
        self._rest_is_loaded = True

    def settle(self) -> None:
        """Let the rest follow its parameter to another device.

        Raises:
            RuntimeError: The parameter is no longer in the dtype that it was stored in.
        """
        if self.param.dtype not in {torch.bfloat16, torch.float16}:
            msg = (
                f"a weight of shape {tuple(self.param.shape)} that was stored in 16 bits is in "
                f"{self.param.dtype} now: something has converted the model (model.float(), "
                "model.to(dtype)); delete that call, or store_weights"
            )
            raise RuntimeError(msg)
        if self.rest.device != self.param.device:
            self.rest = self.rest.to(self.param.device)
            self.master.data = _master_data(self.param, self.rest)

    def materialize(self) -> None:
        """Give the master memory; what is in it is not defined."""
        if not self.is_master_kept:
            self.master.data = torch.empty_like(self.param, dtype=torch.float32)

    def release(self) -> None:
        """Free the master's memory."""
        if not self.is_master_kept:
            self.master.data = _master_data(self.param, self.rest)

    @property
    def is_master_kept(self) -> bool:
        """Whether the rest is the master itself."""
        return self.rest.dtype is torch.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeight:
        """Copy with the model that has the parameter."""
        made = StoredWeight(copy.deepcopy(self.param, memo), copy.deepcopy(self.rest, memo))
        made._rest_is_loaded = not self.is_written
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the model that has the parameter."""
        return _restored, (self.param, self.rest, not self.is_written)


def _restored(param: Tensor, rest: Tensor, rest_is_loaded: bool) -> StoredWeight:
    weight = StoredWeight(param, rest)
    weight._rest_is_loaded = rest_is_loaded
    return weight


def _master_data(param: Tensor, rest: Tensor) -> Tensor:
    """The master's data between steps: the rest, or a tensor of the shape without memory."""
    if rest.dtype is torch.float32:
        return rest
    return torch.empty((), dtype=torch.float32, device=param.device).expand(param.shape)
