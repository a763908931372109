"""The options of a loss scale, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from typing_extensions import Self

from amp_plugin.kernels import ops

HysteresisMode = Literal["apex", "megatron", "deepspeed"]
OnNonfinite = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleOptions:
    """The options of a loss scale, checked; :class:`amp_plugin.GradScaler` says what each does.

    Raises:
        ValueError: A number is out of range, or an option unknown.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1
    hysteresis_mode: HysteresisMode = "apex"
    on_min_scale: Literal["hold", "raise"] = "hold"
    dynamic: bool = True

    def __post_init__(self) -> None:
        positive("init_scale", self.init_scale)
        checked_growth_factor(self.growth_factor)
        checked_backoff_factor(self.backoff_factor)
        whole("growth_interval", self.growth_interval)
        whole("hysteresis", self.hysteresis)
        if self.hysteresis_mode not in ops.HYSTERESIS_MODES:
            known = ", ".join(ops.HYSTERESIS_MODES)
            msg = f"hysteresis_mode={self.hysteresis_mode!r} is not known; use one of {known}"
            raise ValueError(msg)
        if self.on_min_scale not in {"hold", "raise"}:
            msg = f"on_min_scale={self.on_min_scale!r} is not known; use 'hold' or 'raise'"
            raise ValueError(msg)
        if not self.floor <= self.init_scale <= self.ceiling:
            msg = (
                f"init_scale={self.init_scale} is not between min_scale={self.floor} and "
                f"max_scale={self.ceiling}; change one of the three"
            )
            raise ValueError(msg)

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """Take the options out of values by name, a function's ``locals()`` for example.

        Args:
            values: options that are missing keep their defaults; other names are left alone.
        """
        return cls(**{option.name: values[option.name] for option in fields(cls) if option.name in values})

    @property
    def floor(self) -> float:
        """The smallest scale."""
        if self.min_scale is None:
            return min(float(torch.finfo(torch.float32).tiny), float(self.init_scale))
        return positive("min_scale", self.min_scale)

    @property
    def ceiling(self) -> float:
        """The largest scale."""
        if self.max_scale is None:
            return float(torch.finfo(torch.float32).max)
        return positive("max_scale", self.max_scale)


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float, or raise ValueError if it is no finite number above 0."""
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        msg = f"{name}={value!r} is not allowed; give a finite number greater than 0"
        raise ValueError(msg)
    return float(value)


def whole(name: str, value: int) -> int:
    """Return ``value`` as an int, or raise ValueError if it is no whole number above 0."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        msg = f"{name}={value!r} is not allowed; give a whole number of at least 1"
        raise ValueError(msg)
    return int(value)


def checked_growth_factor(value: float) -> float:
    """Return the growth factor, or raise ValueError if it would not grow the scale."""
    if not (math.isfinite(value) and value > 1.0):
        msg = f"The growth factor must be > 1.0. Got growth_factor={value!r}; the default is 2.0"
        raise ValueError(msg)
    return float(value)


def checked_backoff_factor(value: float) -> float:
    """Return the backoff factor, or raise ValueError if it would not lower the scale."""
    if not 0.0 < value < 1.0:
        msg = f"The backoff factor must be < 1.0 and > 0.0. Got backoff_factor={value!r}; the default is 0.5"
        raise ValueError(msg)
    return float(value)


def checked_on_nonfinite(given: Any) -> OnNonfinite:
    """Return the option.

    Raises:
        ValueError: It is none of the three.
    """
    if given not in get_args(OnNonfinite):
        msg = f"on_nonfinite={given!r} is not known; use 'skip', 'raise' or 'ignore'"
        raise ValueError(msg)
    return given  # type: ignore[no-any-return]
