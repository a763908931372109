"""``store_weights`` stores a model's weights in 16 bits, and ``restore_weights`` makes them float32 again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from amp_plugin.kernels.build import native_core
from amp_plugin.patterns import matched_modules, require_matches
from amp_plugin.precision import StateName, WeightsName, checked_word, stores_all
from amp_plugin.weights import one_pass  # noqa: F401 - takes bare steps of optimizers with compressed states
from amp_plugin.weights.compressed_state import ask_for, bytes_of
from amp_plugin.weights.ddp import refuse_sharded, sharded_by
from amp_plugin.weights.formats import FORMATS, HALVES
from amp_plugin.weights.fsdp2 import carry_into_shards, gathered_dtypes, notice_new_shards
from amp_plugin.weights.optimizer_hooks import add_late_optimizers, add_optimizer
from amp_plugin.weights.shard import local_of
from amp_plugin.weights.weight import (
    FrozenParameter,
    StoredParameter,
    export_as_is,
    export_fp32,
    forget_way_,
    fp32_shown,
    half_of,
    is_sharded,
    is_unstored_half,
    store_,
    store_once_trained_,
    stored_params,
    stored_weight,
    widen_,
)


class WeightStore:
    """The result of :func:`store_weights`."""

    def __init__(self, model: nn.Module, state: StateName = "fp32") -> None:
        self._model, self._state = model, state

    def __len__(self) -> int:
        """Return the number of parameters that are stored in 16 bits."""
        return len(stored_params(self._model.parameters()))

    def add(self, *optimizers: Optimizer) -> None:
        """Let optimizers that were created after ``store_weights`` update the stored weights in float32.

        Call this method before the optimizers load a state dict.
        """
        for optimizer in optimizers:
            add_optimizer(optimizer, self._state)

    def in_fp32(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which a model's weights are float32. See :func:`in_fp32`."""
        return in_fp32(model)

    def fp32_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return a copy of a model's state dict, with the exact weights in float32."""
        return copy.deepcopy(model.state_dict())


def store_weights(
    model: nn.Module,
    *optimizers: Optimizer,
    weights: WeightsName = "bf16",
    state: StateName = "fp32",
    fp32_modules: Iterable[str] = (),
    seed: int = 0,
) -> WeightStore:
    """Store a model's weights in 16 bits, and let any optimizer update them as exactly as float32 weights.

    The model computes with the 16-bit weights. While an optimizer steps or loads a state dict, its
    parameters, gradients and state are float32, so that small updates are not lost. Before a step, each
    16-bit weight and its remainder are joined into a float32 parameter. After the step, the parameter is
    split into the 16-bit weight and the remainder again.

    The parameters stay the same objects. State dicts, copies and pickles are the same as for a float32 model.
    Call ``store_weights`` before the first step, and before you wrap the model in DistributedDataParallel. If
    an optimizer is created later, pass it to the ``add`` method of the returned store before the optimizer
    loads a state dict. An optimizer that loads no state dict need not be passed to ``add``.

    Args:
        model: A model in float32, bfloat16 or float16, on any device. If FSDP2 shards the model, the model
            must be in float32. In that case, all weights that FSDP2 gathers in 16 bits are also
            stored in 16 bits, including those of norms and embeddings.
        *optimizers: Optimizers of any class that update the model's parameters.
        weights: Which weights are stored, and how. ``"bf16"`` turns each weight that autocast would cast
            (Linear, convolutions, attention projections) into a bfloat16 weight and a 16-bit remainder, which
            together hold all bits of float32. Norms, embeddings and other weights stay float32. ``"fp16"``
            stores the same weights in float16, each with a float32 copy. ``"bf16-true"`` and ``"fp16-true"``
            store all weights, for a model that computes in 16 bits without autocast. ``"bf16-stochastic"``
            stores the same weights as ``"bf16"``, but without remainders. With ``"bf16-stochastic"``, each
            step rounds the new weights stochastically. ``"fp32"`` stores no weight in 16 bits. With
            ``"fp32"``, weights that are already in 16 bits become float32, and frozen 16-bit weights become
            float32 once they become trainable.
        state: The format of the optimizers' moments between steps, which is ``"fp32"``, ``"bf16"`` or
            ``"8bit"``. The 8-bit format has one scale for each 128 elements. If amp_plugin has a one-pass
            step for the optimizer's class, a single op reads and writes the compressed moments. For other
            optimizers, the moments are float32 during a step. States that are not moments stay float32.
        fp32_modules: Names of modules (``"head"``, ``"blocks.*.norm"``) or classes (``"LayerNorm"``) whose
            weights must stay in float32.
        seed: The seed of stochastic rounding. It must be the same on all ranks.

    Returns:
        A WeightStore with the methods ``add(optimizer)``, ``in_fp32(model)`` and ``fp32_state_dict(model)``.
        ``len(store)`` is the number of stored weights.

    Raises:
        ValueError: ``weights`` or ``state`` has an unknown value, a pattern in ``fp32_modules`` matches no
            module, a weight is on the meta device, or an optimizer has state in 16 bits. The error is also
            raised if FSDP2 does not gather the weights of a sharded model in 16 bits.
        TypeError: FSDP1 or DeepSpeed shards the model, an optimizer steps in backward, or an optimizer did
            not call ``Optimizer.__init__``.
        RuntimeError: A stored weight was converted to another dtype.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> store = store_weights(model, optimizer, weights="bf16")
        >>> model.weight.dtype, model.state_dict()["weight"].dtype, len(store)
        (torch.bfloat16, torch.float32, 2)
        >>> model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> model.weight.grad.dtype
        torch.float32
    """
    name = checked_word("weights", weights, WeightsName)
    state = checked_word("state", state, StateName)
    refuse_sharded(name, sharded_by(model))
    if name == "fp32":
        restore_weights(model)
    else:
        carry_into_shards()
        # Compile and load the native core now, because optimizer steps are slow without it.
        # A step takes 1.5 times as long as a step with float32 weights, or 9 times as long without the core.
        native_core()
        _store(model, name, tuple(fp32_modules), seed)
    # Sharded 16-bit weights are not converted. A warning appears when an optimizer steps them.
    if not any(map(is_sharded, model.parameters())):
        convert_to_fp32(model)
    if name != "fp32" or state != "fp32":
        add_late_optimizers()
    ask_for(model.parameters(), state)
    store = WeightStore(model, state)
    store.add(*optimizers)
    return store


def restore_weights(model: nn.Module) -> None:
    """Make the stored weights of a model ordinary float32 weights, in place and exactly.

    A model whose weights are not stored in 16 bits is left unchanged. The model's optimizers can continue. A
    DistributedDataParallel wrapper around the model can no longer be used.

    Args:
        model: The model.

    Raises:
        RuntimeError: A stored weight was converted to another dtype.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> store = store_weights(model)
        >>> restore_weights(model)
        >>> model.weight.dtype
        torch.float32
    """
    ask_for(model.parameters(), "fp32")
    for param in model.parameters():
        forget_way_(param)
        if stored_weight(param) is not None:
            widen_(param)
    export_as_is(model)


def in_fp32(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which stored weights are float32, so that you can average, export or edit them.

    Inside the context the model's parameters are float32. When the context ends, the parameters are stored in
    16 bits again, with the values that were written to them. Contexts may be nested, and optimizers may step
    inside. Do not train with DistributedDataParallel inside the context.

    Args:
        model: The model, or a wrapper around it.
    """
    return fp32_shown(list(model.parameters()))


def is_stored(model: nn.Module) -> bool:
    """Return whether ``store_weights`` has stored weights of a model (or wrapped model) in 16 bits."""
    return bool(stored_params(model.parameters()))


# -- which weights ---------------------

_PROJECTIONS: Final = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# Maps module classes to the names of weights that autocast always casts, on every device.
_CAST: Final[dict[type[nn.Module], tuple[str, ...]]] = {
    nn.Linear: ("weight", "bias"),
    _ConvNd: ("weight", "bias"),
    nn.MultiheadAttention: _PROJECTIONS,
    nn.RNNCellBase: ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
}
_CAST_BY_NAME: Final = {"transformers.pytorch_utils.Conv1D": ("weight", "bias")}


def _cast_names(module: nn.Module) -> Iterable[str]:
    """Return the names of a module's direct parameters that autocast always casts."""
    kind = type(module)
    names: Iterable[str] = next((names for known, names in _CAST.items() if isinstance(module, known)), ())
    # Under autocast, cuDNN always computes RNNs in float16. So RNN weights stay in float32 if there is a GPU.
    if isinstance(module, nn.RNNBase) and not torch.accelerator.is_available():
        names = module._flat_weights_names
    torchs: Any = next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn."))
    if kind.forward is torchs.forward:
        return names
    return _CAST_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}", ())


def _store(model: nn.Module, name: str, patterns: tuple[str, ...], seed: int) -> None:
    """Store the chosen parameters of a model in 16 bits.

    Frozen parameters that are already in 16 bits are converted only when they become trainable.
    """
    require_matches([model], patterns)
    # For a stored weight on the meta device, to_empty() would create a 16-bit weight without its remainder.
    if any(param.is_meta for param in model.parameters()):
        msg = f"weights={name!r} for a model on the meta device: give the model memory and values first"
        raise ValueError(msg)
    computed_in_16_bits = _computed_in_16_bits(model, name, patterns)
    for param in model.parameters():
        fits = param in computed_in_16_bits and _can_be_stored(param)
        if is_unstored_half(param) and not param.requires_grad:
            store_once_trained_(param, name if fits else "fp32", seed=seed)
        elif fits and (param.requires_grad or stored_weight(param) is not None or stores_all(name)):
            store_(param, name, seed=seed)
        elif stored_weight(param) is not None:
            widen_(param)
    notice_new_shards(model)
    export_fp32(model)


def _computed_in_16_bits(model: nn.Module, name: str, patterns: tuple[str, ...]) -> set[Tensor]:
    """Return the parameters that FSDP2 gathers in 16 bits or that autocast casts to 16 bits."""
    found: set[Tensor] = set()
    others: set[Tensor] = set()
    for module in model.modules():
        own = module._parameters
        names = own if stores_all(name) else _cast_names(module)
        # Batch norm has float32 statistics, and torch requires its weights to have the same dtype.
        if isinstance(module, _NormBase):
            names = ()
        for key, param in own.items():
            if param is not None:
                (found if key in names else others).add(param)
    # A tied weight is stored in 16 bits only if autocast casts it in every module that uses it.
    found -= others
    gathered = gathered_dtypes(model)
    found -= gathered.keys()
    found |= {param for param, dtype in gathered.items() if dtype is FORMATS[name].dtype}
    for module in matched_modules(model, patterns).values():
        found.difference_update(module.parameters())
    _refuse_unfit_shards(model, name, found, gathered)
    return found


def _can_be_stored(param: Tensor) -> bool:
    if is_sharded(param):
        return param.dtype is torch.float32
    known = type(param) in {nn.Parameter, FrozenParameter, StoredParameter}
    return known and param.dtype in {torch.float32, *HALVES}


def _refuse_unfit_shards(
    model: nn.Module, name: str, chosen: set[Tensor], gathered: Mapping[Tensor, torch.dtype]
) -> None:
    """Raise ValueError if a sharded model cannot compute with weights in the format ``name``."""
    sharded = [param for param in model.parameters() if is_sharded(param)]
    dtype, msg = FORMATS[name].dtype, ""
    halves = [param for param in sharded if param.requires_grad and is_unstored_half(param)]
    if halves:
        msg = (
            f"weights={name!r} for a model whose shards are in {halves[0].dtype}: call model.float() before "
            "fully_shard"
        )
    elif gathered and chosen.isdisjoint(gathered):
        msg = (
            f"weights={name!r} for a sharded model that gathers no weight in {dtype}: shard it by "
            f"fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, "
            "reduce_dtype=torch.float32)), or by amp_plugin.fully_shard(model, plan)"
        )
    elif stores_all(name) and any(param not in gathered for param in sharded):
        msg = (
            f"weights={name!r} for DTensors that FSDP2 does not gather: only autocast converts them to "
            f"16 bits. Use weights={name.removesuffix('-true')!r} under autocast"
        )
    if msg:
        raise ValueError(msg)


# -- models that come in 16 bits -------


def convert_to_fp32(model: nn.Module) -> str:
    """Convert a model's trainable 16-bit parameters to float32.

    Frozen parameters are converted once they become trainable. Buffers of modules with converted parameters
    are converted too.

    Returns:
        A sentence that says what was converted, or "" if nothing was.
    """
    found: dict[nn.Parameter, torch.dtype] = {}
    for module in model.modules():
        halves = [param for param in module.parameters(recurse=False) if is_unstored_half(param)]
        # Torch requires the weights and statistics of a batch norm to have the same dtype.
        is_norm = isinstance(module, _NormBase)
        trained = {param: param.dtype for param in halves if param.requires_grad or is_norm}
        for name, buffer in module.named_buffers(recurse=False):
            if trained and buffer.dtype in HALVES:
                module._buffers[name] = buffer.float()
        for param in halves:
            if param not in trained and not isinstance(param, FrozenParameter):
                store_once_trained_(param, "fp32")
        found |= trained
    for param in found:
        widen_(param)
    if not found:
        return ""
    name = "bf16" if torch.bfloat16 in found.values() else "fp16"
    return (
        f"{len(found)} parameters came in {name} and are float32 now, since 16 bits lose small updates. "
        f"weights={name!r} keeps them in 16 bits, as exactly"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """The sizes in bytes of the tensors that this process holds between two optimizer steps.

    Attributes:
        parameters: The total number of elements in all parameters. Tied parameters are counted once. For
            sharded parameters, only this rank's elements are counted.
        weights, gradients, optimizer_state: The size in bytes of the tensors of each kind.
        masters: The size in bytes of the remainders and float32 copies of stored weights.
    """

    parameters: int
    weights: int
    masters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """The sum of the four byte counts."""
        return self.weights + self.masters + self.gradients + self.optimizer_state

    def per_parameter(self) -> dict[str, float]:
        """Return a dict with the bytes per parameter, for each kind of tensor and for ``"total"``."""
        kinds = ("weights", "masters", "gradients", "optimizer_state", "total")
        return {kind: getattr(self, kind) / max(1, self.parameters) for kind in kinds}

    def __str__(self) -> str:
        """Return the numbers as one line."""
        *parts, (_, total) = self.per_parameter().items()
        kinds = ", ".join(f"{kind.replace('_', ' ')} {size:.3g}" for kind, size in parts)
        return f"{total:.3g} bytes per parameter ({kinds}) for {self.parameters} parameters"


def weight_bytes(model: nn.Module, *optimizers: Optimizer) -> WeightBytes:
    """Count the bytes of a model's weights, gradients and optimizer states, without a host sync.

    Args:
        model: The model, or a wrapper around it.
        *optimizers: The optimizers of the model, from torch or a framework.

    Returns:
        The bytes that the weights, gradients and optimizer states occupy now. Call this function after the
        ``backward`` of the second step, when gradients and optimizer states exist.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> print(weight_bytes(model))
        4 bytes per parameter (weights 4, masters 0, gradients 0, optimizer state 0) for 4 parameters
    """
    params = list(model.parameters())
    return WeightBytes(
        parameters=sum(local_of(param).numel() for param in params),
        weights=bytes_of([half_of(param) for param in params]),
        masters=bytes_of([weight.kept for param in params if (weight := stored_weight(param)) is not None]),
        gradients=bytes_of([param.grad for param in params]),
        optimizer_state=bytes_of([dict(optimizer.state) for optimizer in optimizers]),
    )
