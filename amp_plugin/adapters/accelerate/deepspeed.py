"""Translates options into DeepSpeed config keys under Accelerate, and logs the engine's steps.

If the config enables neither ZeRO nor fp16 nor bf16, the engine uses amp_plugin's GradScaler instead of
torch's. If ZeRO, fp16 or bf16 is enabled, DeepSpeed's engine scales losses and skips steps itself, and
:func:`steps_noted` only logs its steps. This module never imports DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from amp_plugin.adapters.scaler import register
from amp_plugin.adapters.session import Session
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.messages import OptionError, warn_user
from amp_plugin.options import option_defaults
from amp_plugin.patterns import found_patterns
from amp_plugin.scaling.grad_scaler import GradScaler
from amp_plugin.scaling.overflows import OverflowReport
from amp_plugin.scaling.step_log import StepResult

# The next six constants say how each option of AmpKwargs is handled under DeepSpeed.
# A test checks that these constants cover all options of AmpKwargs.

INSTEAD: Final = {
    "weights": "'fp16_master_weights_and_grads' of 'fp16' or 'bf16_master_weights_and_grads' of 'bf16'",
    "state": "'bf16_optimizer_states' of 'bf16'",
    "reduce": "'communication_data_type'",
    "eval_precision": "'dtype' of 'torch_autocast', which applies to evaluation too",
    "fp32_outputs": "'auto_cast' of 'fp16' for inputs; outputs keep their dtype",
    "formats": "'enabled' of 'bf16' (convert layers by amp_plugin.convert before prepare())",
    "emulate": "'enabled' of 'bf16' (convert layers by amp_plugin.convert before prepare())",
    "on_spike": "'gradient_clipping', which bounds every step,",
    "fp16_gradients": "'fp16_master_weights_and_grads' of 'fp16'",
}
"""Maps options that have no effect here to the setting of DeepSpeed that does the same."""
FP16_KEYS: Final[dict[str, tuple[str, Callable[[Any], Any], str]]] = {
    "init_scale": ("initial_scale_power", lambda scale: _whole(math.log2(scale)), "powers of 2"),
    "growth_interval": ("loss_scale_window", int, ""),
    "min_scale": ("min_loss_scale", lambda scale: _whole(scale) or None, "whole numbers from 1 on"),
    "hysteresis": ("hysteresis", int, ""),
    "hysteresis_mode": ("consecutive_hysteresis", {"apex": True, "deepspeed": False}.get, "apex, deepspeed"),
}
"""Maps an option of the loss scale to a key of the section fp16, a function, and allowed values."""
FIXED: Final = {"growth_factor": 2.0, "backoff_factor": 0.5, "max_scale": None, "on_min_scale": "raise"}
"""Maps options of the loss scale without a key in DeepSpeed to the value that DeepSpeed always uses."""
IN_AUTOCAST: Final = ("rules", "fp32_modules")
"""Options that take effect in DeepSpeed's autocast."""
IN_OTHER_WAYS: Final = {
    "dynamic": "loss_scale of the section fp16, or its absence",
    "on_nonfinite": "check_grad_overflow of the section bf16",
    "one_pass": "our scaler, where it stands in the engine's place; nothing else reads it",
    "exact_schedulers": "always: the engine waits for each step",
}
"""Options that take effect in another way."""
BY_OUR_LOG: Final = ("log", "max_skips_in_a_row", "report")
"""Options that the log of the engine's steps acts on.

The scaler gets the options of a loss scale. The session and the accelerator read the others.
"""

_SCALED_IN_ZERO: Final = (
    "under 'torch_autocast' in float16 with a ZeRO stage, DeepSpeed 0.19 clips gradients while they are "
    "multiplied by the loss scale: set 'stage' of 'zero_optimization' to 0, or use 'fp16' or bfloat16"
)
_CLIPPED_IN_UNFUSED: Final = (
    "DeepSpeed 0.19 changes weights far too little if its unfused optimizer (fp16 without ZeRO) clips: "
    "set 'stage' of 'zero_optimization' to 1, leave 'gradient_clipping' out, or use bfloat16"
)


def translate(session: Session, config: dict[str, Any]) -> None:
    """Write the options into DeepSpeed's config.

    Raise an error if DeepSpeed's config contradicts an option or has no key for the option.
    """
    options, autocast = session.options, _is_on(config, "torch_autocast")
    defaults = option_defaults(type(options))
    for name in session.sources:
        if name in INSTEAD and getattr(options, name) != defaults[name]:
            raise _refused(session, name, f"set {INSTEAD[name]} in its config")
        if name in IN_AUTOCAST and not autocast:
            raise _refused(
                session, name, "it has an effect in autocast only: set 'enabled' of 'torch_autocast'"
            )
        if name == "on_nonfinite" and not is_ours(config):
            _translate_checks(session, config)
        elif name in {*FP16_KEYS, *FIXED, "dynamic"} and not is_ours(config):
            _translate_scale(session, name, config)


def _translate_checks(session: Session, config: dict[str, Any]) -> None:
    looks = session.options.on_nonfinite != "ignore"
    if _is_on(config, "bf16"):
        _set(session, config, ("bf16", "check_grad_overflow"), looks, "on_nonfinite")
    elif looks != _is_on(config, "fp16") and not _is_on(config, "torch_autocast"):
        remedy = "fp16 always checks, fp32 never: see 'enabled' of 'bf16', and 'stage' of 'zero_optimization'"
        raise _refused(session, "on_nonfinite", remedy)


def _translate_scale(session: Session, name: str, config: dict[str, Any]) -> None:
    """Write a loss-scale option into the "fp16" section of the config. In bf16 it has no effect."""
    given = getattr(session.options, name)
    if not _is_on(config, "fp16"):
        if config.get("torch_autocast", {}).get("dtype") == "float16":
            remedy = "its loss scale has no key: set 'stage' of 'zero_optimization' to 0, or use 'fp16'"
            raise _refused(session, name, remedy)
    elif name in FP16_KEYS:
        key, convert, wanted = FP16_KEYS[name]
        value = convert(given)
        if value is None:
            raise _refused(session, name, f"{key!r} of 'fp16' takes {wanted}")
        _set(session, config, ("fp16", key), value, name)
    elif name == "dynamic":
        if not given:
            _set(session, config, ("fp16", "loss_scale"), session.options.init_scale, name)
    elif given != FIXED[name]:
        raise _refused(session, name, f"it has no key there, and is always {FIXED[name]!r}")


def _set(session: Session, config: dict[str, Any], path: tuple[str, str], value: Any, name: str) -> None:
    section, key = path
    known = config[section].get(key, "auto")
    if known not in {"auto", value}:
        given = getattr(session.options, name)
        asked = f"{name}={given!r} (from {session.sources[name]})"
        msg = f"{asked} disagrees with DeepSpeed's {key!r}: {known!r} of {section!r}; set one of the two"
        raise OptionError(name, given, repr(known), msg)
    config[section][key] = value


def _refused(session: Session, name: str, remedy: str) -> OptionError:
    given = getattr(session.options, name)
    text = f"{name}={given!r} has no effect under DeepSpeed (from {session.sources[name]}): {remedy}"
    return OptionError(name, given, remedy, text)


def _whole(number: float) -> int | None:
    return int(number) if float(number).is_integer() else None


def _is_on(config: Mapping[str, Any], section: str) -> bool:
    return config.get(section, {}).get("enabled") is True


def is_ours(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed's engine can use amp_plugin's GradScaler instead of torch's.

    The engine can use amp_plugin's GradScaler if the config enables neither ZeRO nor fp16 nor bf16.
    """
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return not (stage or _is_on(config, "fp16") or _is_on(config, "bf16"))


def scaler_for_engine(engine: Any, session: Session, config: Mapping[str, Any]) -> GradScaler:
    """Return a scaler for the engine to use, or a disabled scaler, whose log gets the engine's steps."""
    apply_fp32_modules(engine.module, found_patterns(engine.module, session.options.fp32_modules))
    if is_ours(config):
        scales = engine.torch_autocast_z0_gradscaler is not None
        scaler = session.new_scaler(enabled=scales, device=engine.device.type)
        # DeepSpeed's engine calls ``unscale_`` before it clips, so the norm is measured before clipping.
        if not scaler.is_enabled():
            scaler.unscale_ = scaler.core.measure  # type: ignore[method-assign, assignment]
        engine.torch_autocast_z0_gradscaler = scaler
        scaler.core.log.wait_for()
        scaler.core.log.subscribe(_show_overflow)
    else:
        scaler = session.new_scaler(enabled=False)
        warn_of_defects(engine)
    register(scaler, [engine.optimizer], [engine.module])
    return scaler


def _show_overflow(step: StepResult) -> None:
    optimizer: Any = step.optimizer()
    optimizer.overflow = step.skipped


def warn_of_defects(engine: Any) -> None:
    """Warn if DeepSpeed would clip gradients wrongly."""
    if _torchs_scaler(engine) is not None:
        warn_user(_SCALED_IN_ZERO)
    if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer" and engine.gradient_clipping() > 0:
        warn_user(_CLIPPED_IN_UNFUSED)


def _torchs_scaler(engine: Any) -> Any:
    """Return the torch ``GradScaler`` that the engine's ZeRO optimizer uses under autocast, or None."""
    return getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def scale_of(engine: Any) -> float:
    """Return the loss scale of an engine that scales losses itself, or 1.0 if it scales no loss."""
    optimizer, torchs = engine.optimizer, _torchs_scaler(engine)
    if torchs is not None:
        return float(torchs.get_scale())
    return float(getattr(getattr(optimizer, "loss_scale_config", optimizer), "cur_scale", None) or 1.0)


@contextmanager
def steps_noted(engine: Any, scaler: GradScaler) -> Iterator[None]:
    """Log the step that an engine takes in the block, with its loss scale and gradient norm.

    The engine itself scales the loss and runs the optimizer step.
    """
    before, steps, skips = scale_of(engine), engine.global_steps, engine.skipped_steps
    yield
    if engine.global_steps == steps:
        return
    skipped = engine.skipped_steps > skips
    norm, tensor = engine.get_global_grad_norm(), partial(torch.tensor, dtype=torch.float32)
    if norm is not None and _torchs_scaler(engine) is not None:
        # With torch's scaler, ZeRO measures the norm of scaled gradients.
        norm = norm / before
    result = StepResult(
        norm=None if norm is None else tensor(float(norm)),
        found_inf=tensor(float(skipped)),
        scale_before=tensor(before) if before != 1.0 else None,
        scale_after=[tensor(scale_of(engine))],
        report=partial(OverflowReport, unattributed=skipped),
        known=skipped,
        how="the step of DeepSpeed's engine",
    )
    scaler.core.note_step(engine.optimizer, result=result)
