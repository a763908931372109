"""Loss scales: a number on the device and the rule by which it changes.

The scale and its trackers of growth and hysteresis live on the device. One op changes them there, by the rule
of :func:`amp_plugin.kernels.reference.update_scale_`, so no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_plugin.kernels import ops
from amp_plugin.messages import warn_user
from amp_plugin.options import LossScaleOptions
from amp_plugin.scaling.words import Words

_RULE = {"growth_factor": float, "backoff_factor": float, "growth_interval": int}
_TORCH_KEYS = ("scale", *_RULE, "_growth_tracker")
_OUR_KEY = "amp_plugin"
_HYSTERESIS = "hysteresis_tracker"


class PendingScale(NamedTuple):
    """A loss scale as it was when a loss was multiplied by it; the backward is yet to come."""

    loss_scale: LossScale
    edition: tuple[int, int]
    value: Tensor  # float32, 0-dim

    def change(self) -> Tensor | None:
        """Return the present value divided by the one read, float32, 0-dim; None if it is the same."""
        unchanged = self.loss_scale.edition == self.edition
        return None if unchanged else self.loss_scale.require() / self.value


class LossScale:
    """One loss scale: its tensors, made on the device of the first loss, and the rule by which it changes."""

    def __init__(self, options: LossScaleOptions) -> None:
        self.options = options
        rule = (options.growth_factor, options.backoff_factor, options.growth_interval)
        growth, backoff, interval = rule if options.dynamic else (1, 1, 0)  # may be changed while training
        self.growth_factor, self.backoff_factor = float(growth), float(backoff)
        self.growth_interval = int(interval)
        self.init_scale = float(options.init_scale)
        self.init_growth_tracker = 0
        self.init_hysteresis_tracker = options.hysteresis if options.dynamic else 1
        self.value: Tensor | None = None  # float32, 0-dim
        self.growth_tracker: Tensor | None = None  # good steps since the last change, int32, 0-dim
        self.hysteresis_tracker: Tensor | None = None  # overflows still tolerated, int32, 0-dim
        self.generation = 0  # increases whenever the value may have changed
        self.later: list[Tensor] = []  # will hold its value after the next update, for results
        self.floor, self._ceiling = options.floor, options.ceiling
        self.found_inf: Tensor | None = None
        self._derived: dict[Any, Tensor] = {}
        self._derived_from: tuple[int, int] | None = None
        self._captured = False

    @property
    def edition(self) -> tuple[int, int]:
        """What changes whenever the value may have changed, also by a program that writes to its tensor."""
        value = self.require()
        return self.generation, 0 if value.is_inference() else value._version

    def materialize(self, device: torch.device | str) -> Tensor:
        """Make the tensors on ``device`` if there are none, and return the scale."""
        if self.value is None:
            self.replace(torch.full((), self.init_scale, dtype=torch.float32, device=device))
        return self.require()

    def require(self) -> Tensor:
        """Return the scale's tensor; it must have been made."""
        if self.value is None:
            msg = "the loss scale has no tensor yet; call scaler.scale(loss) first"
            raise RuntimeError(msg)
        return self.value

    def replace(self, value: Tensor | None) -> None:
        """Take another tensor for the scale, as code written for torch's scaler does; make the trackers."""
        self.value, self._derived_from = value, None
        self.generation += 1
        if value is not None and self.growth_tracker is None:
            self.growth_tracker, self.hysteresis_tracker = (
                torch.full((), count, dtype=torch.int32, device=value.device)
                for count in (self.init_growth_tracker, self.init_hysteresis_tracker)
            )

    def snapshot(self, device: torch.device | None = None, *, inverse: bool = False) -> Tensor:
        """Return a copy of the scale, or 1/scale, that later updates leave alone (float32, 0-dim).

        It is kept until the value changes, for each stream, since another one may run before it is there. A
        replayed graph reads the live scale and changes it unseen: from the first capture on nothing is kept.
        """
        value = self.require()
        edition = self.edition
        self._captured = self._captured or capturing(value.device)
        if self._captured or edition != self._derived_from:
            self._derived, self._derived_from = {}, edition
        device = device or value.device
        key = (inverse, device, stream_number(value.device), stream_number(device))
        if key not in self._derived:
            self._derived[key] = moved(value.reciprocal() if inverse else value.clone(), device)
        return self._derived[key]

    def multiply(self, output: Tensor) -> Tensor:
        """Return ``output`` times the scale, float16 as float32, in which it cannot overflow here."""
        self.materialize(output.device)
        return widened(output) * self.snapshot(output.device)

    def read(self) -> PendingScale:
        """Return what the scale is now, to tell later whether it has changed; no host sync."""
        return PendingScale(self, self.edition, self.snapshot())

    def record(self, found_inf: Tensor) -> None:
        """Record one optimizer's check, for the next update."""
        found_inf = moved(found_inf, self.require().device)
        if self.found_inf is None:
            self.found_inf = found_inf
        elif self.found_inf is not found_inf:  # clip and step hand over the same check
            self.found_inf = torch.maximum(self.found_inf, found_inf)

    def replace_checks(self, found_infs: Iterable[Tensor], *, keep: bool) -> None:
        """Take other checks for the next update than were recorded; ``keep`` those of earlier updates."""
        self.found_inf = self.found_inf if keep else None
        for found_inf in found_infs:
            self.record(found_inf)

    def update_(self) -> Tensor | None:
        """Apply the recorded checks, by one op on the device; a constant scale only forgets them."""
        found, self.found_inf = self.found_inf, None
        options = self.options
        if found is None or not options.dynamic:
            return None
        value = self.require()
        watched = options.on_min_scale == "raise" or options.min_scale is not None
        at_floor = torch.logical_and(found > 0, value <= self.floor).float() if watched else None
        trackers = (self.growth_tracker, self.hysteresis_tracker)
        rule = (self.growth_factor, self.backoff_factor, self.growth_interval, self.floor, self._ceiling)
        tolerated = (options.hysteresis, ops.HYSTERESIS_MODES[options.hysteresis_mode])
        torch.ops.amp_plugin.update_scale_(value, *trackers, found, *rule, *tolerated)
        self.generation += 1
        return at_floor

    def publish(self) -> None:
        """Give the present value to results of earlier steps: an update was applied."""
        self.later.append(self.snapshot())
        self.later = []

    def fill_(self, value: float | Tensor) -> None:
        """Set the scale by hand."""
        if isinstance(value, Tensor):
            self.require().copy_(value.detach().reshape(()))
        else:
            self.require().fill_(float(value))
        self.generation += 1

    def item(self) -> float:
        """Return the scale as a number: a host sync."""
        return self.init_scale if self.value is None else self.value.item()

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers under torch's names: a host sync; a constant scale has torch's default rule."""
        rule = self if self.options.dynamic else LossScaleOptions()
        steps, tolerance = self.growth_tracker, self.hysteresis_tracker
        return {
            "scale": self.item(),
            **{name: getattr(rule, name) for name in _RULE},
            "_growth_tracker": self.init_growth_tracker if steps is None else int(steps.item()),
            _HYSTERESIS: self.init_hysteresis_tracker if tolerance is None else int(tolerance.item()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over saved numbers, on the device if the tensors exist."""
        self.init_scale = float(saved["scale"])
        self.init_growth_tracker = int(saved.get("_growth_tracker", 0))
        self.init_hysteresis_tracker = int(saved.get(_HYSTERESIS, self.init_hysteresis_tracker))
        if self.options.dynamic:
            for name, kind in _RULE.items():
                setattr(self, name, kind(saved.get(name, getattr(self, name))))
        self.found_inf = None
        for tensor, number in (
            (self.value, self.init_scale),
            (self.growth_tracker, self.init_growth_tracker),
            (self.hysteresis_tracker, self.init_hysteresis_tracker),
        ):
            if tensor is not None:
                tensor.fill_(number)
        self.generation += 1

    def __getstate__(self) -> dict[str, Any]:
        """Keep numbers instead of tensors, which may live on a device the reader lacks."""
        now = self.state_dict()
        return {
            **self.__dict__,
            "init_scale": now["scale"],
            "init_growth_tracker": now["_growth_tracker"],
            "init_hysteresis_tracker": now[_HYSTERESIS],
            **dict.fromkeys(("value", "growth_tracker", _HYSTERESIS, "found_inf", "_derived_from")),
            "_derived": {},
            "later": [],
        }


class LossScales:
    """The loss scales of a scaler: the default one, and one for each named loss."""

    def __init__(self, options: LossScaleOptions, names: Sequence[str] = (), *, enabled: bool = True) -> None:
        if isinstance(names, str) or len(set(names)) < len(names):
            msg = f"losses={names!r} is not allowed; give a list of different names, as ['pixel', 'edges']"
            raise ValueError(msg)
        self.enabled = enabled
        self.default = LossScale(options)
        self.named = {name: LossScale(options) for name in names}
        self.updates_requested = 0  # torch forgets there what it knows of optimizers

    def switch(self, enabled: bool) -> None:
        """Scale losses from now on, or no more."""
        self.enabled = enabled

    def of(self, name: str | None) -> LossScale:
        """Return the scale of a loss; None is the default."""
        if name is None:
            return self.default
        if name not in self.named:
            known = ", ".join(self.named) or "none"
            msg = f"loss {name!r} is not known; the constructor's losses= named: {known}"
            raise ValueError(msg)
        return self.named[name]

    def materialized(self) -> list[LossScale]:
        """Return those that have been used."""
        return [used for used in (self.default, *self.named.values()) if used.value is not None]

    @property
    def device(self) -> torch.device | None:
        """Where the scales are; None if none has been used."""
        return next((used.require().device for used in self.materialized()), None)

    def require(self, call: str, words: Words) -> LossScale:
        """Return the first scale that has been used."""
        used = next(iter(self.materialized()), None)
        if used is None:
            msg = f"Attempted {call} but _scale is None. Call {words.backward} earlier in the iteration."
            raise RuntimeError(msg)
        return used

    def state_dict(self, skipped_steps: int) -> dict[str, Any]:
        """Return the state of a scaler, torch's keys and ours: a host sync."""
        saved = self.default.state_dict()
        losses = {name: loss_scale.state_dict() for name, loss_scale in self.named.items()}
        ours = {_HYSTERESIS: saved.pop(_HYSTERESIS), "skipped_steps": skipped_steps, "losses": losses}
        return {**saved, _OUR_KEY: ours}

    def load_state_dict(self, saved: dict[str, Any]) -> int:
        """Take over what a state holds, ours or torch's, and return its count of skipped steps."""
        ours = saved.get(_OUR_KEY, {})
        self.default.load_state_dict({**saved, **ours})
        for name, state in ours.get("losses", {}).items():
            if name in self.named:
                self.named[name].load_state_dict(state)
        return int(ours.get("skipped_steps", 0))


def is_state(given: Any) -> bool:
    """Whether something is the state of a scaler; warns if it is not, and raises if it is not whole."""
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
    """Return float32 for float16; a 0-dim one is widened by the product itself."""
    return output.float() if output.dtype is torch.float16 and output.dim() else output


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on ``device``; only the host waits for its copies, a stream keeps the order."""
    if tensor.device == device:
        return tensor
    to_host = device.type == "cpu" and tensor.device.type != "cpu"
    return tensor.to(device, non_blocking=not to_host)


def stream_number(device: torch.device) -> int:
    """Return a number for a device's current stream: what is made on one may not be ready on another."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0


def capturing(device: torch.device) -> bool:
    """Whether work on ``device`` is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _one(device: torch.device, stream: int) -> Tensor:
    """Return 1 for a stream of a device, made once."""
    del stream
    return torch.ones((), dtype=torch.float32, device=device)


def divisor_of(scale: LossScale | None, device: torch.device) -> tuple[Tensor, bool]:
    """Return what unscales on ``device`` (float32, 0-dim), and whether it divides; else it multiplies."""
    if scale is None:
        # One of a graph's capture or of fake tensors is its own.
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
        except TypeError:  # its constructor takes something else
            return content
    if isinstance(outputs, list | tuple):
        items = (scale_outputs(value, apply) for value in outputs)
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes):
        return (scale_outputs(value, apply) for value in outputs)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}; pass the loss"
    raise ValueError(msg)
