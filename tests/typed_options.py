"""How a type checker sees options. ``make lint`` fails if an expected error does not occur."""

from amp_plugin import AmpAccelerator, AmpKwargs, AmpPrecision, FabricAmpPrecision, GradScaler


def right() -> None:
    """Each entry point accepts its options."""
    GradScaler("cpu", 8.0, min_scale=1.0)
    AmpPrecision("bf16", weights="bf16", fp32_modules=["LayerNorm"])
    AmpPrecision(rules={"device_type": "cpu", "rules": {"aten::softmax": "fp32"}})
    AmpAccelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[AmpKwargs()])


def wrong() -> None:
    """A misspelled option, a value of the wrong type, and a word that is not allowed."""
    GradScaler(init_scal=8.0)  # type: ignore[call-arg]
    FabricAmpPrecision(init_scale="8")  # type: ignore[arg-type]
    AmpKwargs(on_nonfinite="stop")  # type: ignore[arg-type]
    AmpAccelerator(mixed_precison="fp16")  # type: ignore[call-arg]
    AmpAccelerator(mixed_precision="fp17")  # type: ignore[arg-type]
