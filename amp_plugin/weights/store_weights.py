"""store_weights: train a model whose weights are stored in 16 bits, without losing an update."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from amp_plugin.precision import WeightsName
from amp_plugin.weights.conversion import convert_to_fp32, storable
from amp_plugin.weights.forms import FORMS
from amp_plugin.weights.refusals import checked_name, refuse_sharded, sharded_by
from amp_plugin.weights.thawed import expect_thawed, widen_when_thawed
from amp_plugin.weights.weight_store import WeightStore, store_of


def store_weights(
    model: nn.Module,
    *optimizers: Optimizer,
    weights: WeightsName = "bf16",
    fp32_modules: Iterable[str] = (),
    seed: int = 0,
) -> WeightStore:
    """Store a model's trainable weights in 16 bits and let any optimizer train them exactly.

    The model computes with the 16 bits as they are. While an optimizer steps, it sees float32 masters in
    its ``param_groups``, gradients in float32 and state in float32, so that each update counts::

        step:  masters = float32 from the weights and what is kept beside them
               the optimizer's own step, on the masters
               weights, what is kept beside them = split(masters)

    Call it once, before the first step; optimizers that are made later are given to ``add`` of what it
    returns, before they load a state dict. One that is not is taken at its first step, with a warning.
    In place: parameters stay the objects they are.

    Args:
        model: float32, bfloat16 or float16; on any device, not sharded.
        *optimizers: Of any class, made before.
        weights: ``"bf16"``: 16 bits more are kept beside each weight, together all bits of float32;
            ``"fp16"``: float32 masters are kept; ``"bf16-stochastic"``: nothing is kept, and each step's
            result is rounded up or down at random; ``"fp32"``: weights in 16 bits become float32, frozen
            ones when they are trained.
        fp32_modules: Names of modules (``"head"``, ``"blocks.*.norm"``) or classes (``"LayerNorm"``) whose
            weights stay in float32.
        seed: Of stochastic rounding; the same on all ranks.

    Returns:
        The store: ``add(optimizer)``, ``in_fp32(model)``, ``fp32_state_dict(model)``.

    Raises:
        ValueError: ``weights`` is unknown, a pattern matches no module, or an optimizer has state in 16 bits.
        TypeError: The model is sharded (FSDP): it stores float32 shards by itself.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> store = store_weights(model, optimizer, weights="bf16")
        >>> model.weight.dtype, len(store)
        (torch.bfloat16, 2)
        >>> model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> model.weight.grad.dtype, store.fp32_state_dict(model)["weight"].dtype
        (torch.float32, torch.float32)
    """
    name = checked_name(weights)
    refuse_sharded(model, name)
    store = store_of(model)
    if name == "fp32":
        convert_to_fp32(model)
        if sharded_by(model) is None and widen_when_thawed(model) is not None:
            for optimizer in optimizers:
                expect_thawed(optimizer)
        return store or WeightStore(FORMS["bf16"])
    in_16_bits, in_fp32 = storable(model, fp32_modules)
    convert_to_fp32(model, only=in_fp32)
    if store is None:
        store = WeightStore(FORMS[name], seed=seed)
    store.take(model, in_16_bits)
    store.add(*optimizers)
    return store
