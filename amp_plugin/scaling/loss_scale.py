"""LossScale is a number on the device, with the rule by which it changes.

A loss scale, its growth tracker and its hysteresis tracker are tensors on the device. One op updates the loss
scale and both trackers on the device, so an update needs no host sync.
:func:`amp_plugin.kernels.reference.update_scale_` defines how an update changes the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from amp_plugin.kernels import ops
from amp_plugin.messages import warn_user
from amp_plugin.options import LossScaleOptions

_RULE = {"growth_factor": float, "backoff_factor": float, "growth_interval": int}
_TORCH_KEYS = ("scale", *_RULE, "_growth_tracker")
HYSTERESIS = "hysteresis_tracker"


Change = Callable[[], Tensor | None]
"""A function that returns by which factor a loss scale has changed since it was made; None if it has not."""


class LossScale:
    """One loss scale, and the rule by which it changes.

    Attributes:
        options: The options that it was made with.
        growth_factor: The factor by which the scale grows. ``growth_factor``, ``backoff_factor`` and
            ``growth_interval`` may be changed during training.
        backoff_factor: The factor by which the scale shrinks after an overflow.
        growth_interval: The number of steps without an overflow before the scale grows; 0 for a constant
            scale.
        init_scale: The first value.
        value: The scale (float32, 0-dim), on the device of the first loss; None until a loss has been scaled.
        growth_tracker: The number of steps since the last overflow or growth of the scale (int32, 0-dim), on
            the device of ``value``.
        hysteresis_tracker: The number of overflows left until the scale shrinks (int32, 0-dim), on the device
            of ``value``. If this tracker is 1, the next overflow shrinks the scale.
        generation: A number that increases whenever the value may have changed.
        later: A list to which the next update appends the new scale. StepResult objects keep the list.
        found_inf: 1.0 if a check since the last update found an overflow (float32, 0-dim); None if there
            was no check.
    """

    def __init__(self, options: LossScaleOptions) -> None:
        self.options = options
        rule = (options.growth_factor, options.backoff_factor, options.growth_interval, options.hysteresis)
        growth, backoff, interval, hysteresis = rule if options.dynamic else (1, 1, 0, 1)
        self.growth_factor, self.backoff_factor = float(growth), float(backoff)
        self.growth_interval = int(interval)
        self.init_scale = float(options.init_scale)
        self.value: Tensor | None = None
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device="cpu")
        self.hysteresis_tracker = torch.tensor(int(hysteresis), dtype=torch.int32, device="cpu")
        self.generation = 0
        self.later: list[Tensor] = []
        self.found_inf: Tensor | None = None
        self._snapshots: dict[Any, Tensor] | None = {}  # None once a CUDA graph was captured

    @property
    def edition(self) -> tuple[int, int]:
        """A pair of numbers that changes whenever the scale may have changed.

        The second number is the version counter of the scale's tensor, which changes if a program writes to
        the tensor.
        """
        value = self.require()
        return self.generation, 0 if value.is_inference() else value._version

    def materialize(self, device: torch.device | str) -> Tensor:
        """Return the scale's tensor, which is created on ``device`` if it does not exist yet."""
        if self.value is None:
            self.replace(torch.full((), self.init_scale, dtype=torch.float32, device=device))
        return self.require()

    def require(self) -> Tensor:
        """Return the scale's tensor, or raise RuntimeError if it does not exist yet."""
        if self.value is None:
            msg = "the loss scale has no tensor yet; call scaler.scale(loss) first"
            raise RuntimeError(msg)
        return self.value

    def replace(self, value: Tensor | None) -> None:
        """Use another tensor as the scale, as code written for torch's scaler does."""
        self.value = value
        if value is not None:
            self.growth_tracker = self.growth_tracker.to(value.device)
            self.hysteresis_tracker = self.hysteresis_tracker.to(value.device)
        self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        """Begin a new generation: the value has changed."""
        self.generation += 1
        if self._snapshots:
            self._snapshots.clear()

    def snapshot(self, device: torch.device | None = None, *, inverse: bool = False) -> Tensor:
        """Return a copy of the scale, or of 1/scale, that later updates do not change (float32, 0-dim).

        Copies are cached until the value changes. Each stream has its own copy, because another stream could
        read a copy before it is complete. A replay of a CUDA graph changes the scale without running Python.
        Therefore no copy is cached after the first capture of a CUDA graph.
        """
        value, device = self.require(), device or self.require().device
        if capturing(value.device):
            self._snapshots = None
        key = (self.edition, inverse, device, stream_number(value.device), stream_number(device))
        known = {} if self._snapshots is None else self._snapshots
        if key not in known:
            known[key] = moved(value.reciprocal() if inverse else value.clone(), device)
        return known[key]

    def multiply(self, output: Tensor) -> Tensor:
        """Return ``output`` times the scale.

        A float16 output becomes float32, so that it does not overflow.
        """
        self.materialize(output.device)
        return widened(output) * self.snapshot(output.device)

    def multiply_in_graph(self, output: Tensor) -> Tensor:
        """Return ``output`` times the scale, which is read each time the compiled graph runs."""
        return widened(output) * moved(self.materialize(output.device).clone(), output.device)

    def change_from_now_on(self) -> Change:
        """Return a function that, when called later, returns the new scale divided by the present one."""
        edition, before = self.edition, self.snapshot()
        return lambda: None if self.edition == edition else self.require() / before

    def record(self, found_inf: Tensor, *, includes: Sequence[Tensor] = ()) -> None:
        """Record for the next update whether a check of gradients found an overflow.

        Args:
            found_inf: 1.0 if there was an overflow, else 0.0 (float32, 0-dim).
            includes: Flags recorded earlier that are already included in ``found_inf``.
        """
        found_inf, before = moved(found_inf, self.require().device), self.found_inf
        if before is None or any(before is flag for flag in (found_inf, *includes)):
            self.found_inf = found_inf
        else:
            self.found_inf = torch.maximum(before, found_inf)

    def replace_checks(self, found_infs: Iterable[Tensor], *, keep: bool) -> None:
        """Replace the recorded overflow flags, or (with ``keep``) combine the new flags with them."""
        self.found_inf = self.found_inf if keep else None
        for found_inf in found_infs:
            self.record(found_inf)

    def update_(self) -> None:
        """Update the scale from the recorded overflow flags, with one op.

        A constant scale does not change.
        """
        found, self.found_inf = self.found_inf, None
        options = self.options
        if found is None or not options.dynamic:
            return
        value = self.require()
        trackers = (self.growth_tracker, self.hysteresis_tracker)
        rule = (self.growth_factor, self.backoff_factor, self.growth_interval, options.floor, options.ceiling)
        tolerated = (options.hysteresis, ops.HYSTERESIS_MODES[options.hysteresis_mode])
        torch.ops.amp_plugin.update_scale_(value, *trackers, found, *rule, *tolerated)
        self._forget_snapshots()

    def publish(self) -> None:
        """After an update, append the new scale to the list that StepResult objects of earlier steps hold."""
        self.later.append(self.snapshot())
        self.later = []

    def fill_(self, value: float | Tensor) -> None:
        """Set the scale to a value, and forget the overflows that the next update would use."""
        self.found_inf = None
        if isinstance(value, Tensor):
            self.require().copy_(value.detach().reshape(()))
        else:
            self.require().fill_(float(value))
        self._forget_snapshots()

    def item(self) -> float:
        """Return the scale as a number. The host waits for the device."""
        return self.init_scale if self.value is None else self.value.item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state under torch's keys. This is a host sync.

        For a constant scale, the state contains torch's default growth and backoff factors.
        """
        rule = self if self.options.dynamic else LossScaleOptions()
        return {
            "scale": self.item(),
            **{name: getattr(rule, name) for name in _RULE},
            "_growth_tracker": int(self.growth_tracker.item()),
            HYSTERESIS: int(self.hysteresis_tracker.item()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a saved state. If the scale's tensor exists, it is overwritten in place."""
        self.init_scale = float(saved["scale"])
        self.growth_tracker.fill_(int(saved.get("_growth_tracker", 0)))
        if HYSTERESIS in saved:
            self.hysteresis_tracker.fill_(int(saved[HYSTERESIS]))
        if self.options.dynamic:
            for name, kind in _RULE.items():
                setattr(self, name, kind(saved.get(name, getattr(self, name))))
        if self.value is not None:
            self.fill_(self.init_scale)

    def __reduce__(self) -> Any:
        """Copy and pickle only the options and the state dict. A pickle can be loaded without a GPU."""
        return LossScale, (self.options,), self.state_dict()

    __setstate__ = load_state_dict


def is_state(given: Any) -> bool:
    """Return whether an object is the state of a scaler. Warn if it is not. Raise if it lacks some keys."""
    if isinstance(given, dict) and "scale" in given:
        if missing := [key for key in _TORCH_KEYS if key not in given]:
            msg = f"the scaler state lacks {', '.join(missing)}"
            raise KeyError(msg)
        return True
    if not given:
        msg = (
            "The source state dict is empty, possibly because it was saved from a disabled instance of "
            "GradScaler. Do not load it, and the scaler keeps its present scale."
        )
        raise RuntimeError(msg)
    keys = ", ".join(map(repr, given)) if isinstance(given, dict) else type(given).__name__
    warn_user(
        f"the scaler state holds {keys}, which is not a GradScaler's ({', '.join(_TORCH_KEYS)}); "
        "the scaler keeps its present scale. Set one with update(new_scale)."
    )
    return False


def widened(output: Tensor) -> Tensor:
    """Convert float16 to float32, except for 0-dim tensors, which become float32 when they are scaled."""
    return output.float() if output.dtype is torch.float16 and output.dim() else output


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to ``device``. The host waits for the copy only if ``device`` is the CPU."""
    if tensor.device == device:
        return tensor
    to_host = device.type == "cpu" and tensor.device.type != "cpu"
    return tensor.to(device, non_blocking=not to_host)


def stream_number(device: torch.device) -> int:
    """Return the id of the current stream. A tensor made on one stream might not be ready on another."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _one(device: torch.device, stream: int) -> Tensor:
    """Return a tensor with the value 1, which is made once for each stream of a device."""
    del stream
    return torch.ones((), dtype=torch.float32, device=device)


def divisor_of(scale: LossScale | None, device: torch.device) -> tuple[Tensor, bool]:
    """Return the number by which gradients on ``device`` must be multiplied or divided to unscale them.

    Returns:
        The number (float32, 0-dim), and True if gradients must be divided by it, else False.
    """
    if scale is None:
        # A captured CUDA graph and fake tensors must not use the cached tensor.
        own = capturing(device) or torch._guards.detect_fake_mode() is not None
        return (_one.__wrapped__ if own else _one)(device, stream_number(device)), False
    value = scale.require()
    here = value.device == device
    return (value, True) if here else (scale.snapshot(device, inverse=True), False)


def scale_outputs(outputs: Any, apply: Callable[[Tensor], Tensor]) -> Any:
    """Return ``outputs`` with every tensor replaced by ``apply(tensor)``."""
    if isinstance(outputs, Tensor):
        return apply(outputs)
    if isinstance(outputs, Mapping):
        content = {key: scale_outputs(value, apply) for key, value in outputs.items()}
        try:
            return type(outputs)(content)  # type: ignore[call-arg]
        except TypeError:
            # The constructor of this kind of mapping does not accept a dict.
            return content
    if isinstance(outputs, list | tuple):
        items = (scale_outputs(value, apply) for value in outputs)
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (scale_outputs(value, apply) for value in outputs)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}; pass the loss"
    raise ValueError(msg)
