"""Which ops are watched for writing a weight through an alias, which moves no version counter of the weight.

They are no part of the op tables: their functors cast nothing and only serve the casts that a region keeps.
"""

from __future__ import annotations

import torch

# A functor costs an op some 0.1 us. These write activations in ordinary forward passes, and hardly a weight.
UNWATCHED = frozenset(
    {
        *("relu_", "relu6_", "leaky_relu_", "rrelu_", "rrelu_with_noise_", "hardtanh_", "hardsigmoid_"),
        *(
            "hardswish_",
            "silu_",
            "mish_",
            "gelu_",
            "elu_",
            "selu_",
            "celu_",
            "threshold_",
            "sigmoid_",
            "tanh_",
        ),
        *("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_", "bernoulli_"),
    }
)

# torch's own quick ops are made of these.
UNWATCHED_OVERLOADS = frozenset(
    {
        *("exp_", "log_", "random_.from", "scatter_.value"),
        *(
            "abs.out",
            "arange.start_out",
            "clamp.out",
            "complex.out",
            "eye.m_out",
            "hardtanh.out",
            "linspace.out",
        ),
        *(
            "logical_and.out",
            "logical_not.out",
            "logsumexp.out",
            "mean.out",
            "sum.IntList_out",
            "where.self_out",
        ),
    }
)


def watched_ops() -> list[str]:
    """Return the dispatcher's names of torch's ops that write, in place or by ``out=``, what they are given.

    Left out are ``UNWATCHED`` and ``UNWATCHED_OVERLOADS``, ops that change a shape or the storage rather than
    values, and the ``out=`` forms that only ``torch.ops`` reaches.
    """
    return [name for name in torch._C._dispatch_get_all_op_names() if _is_watched(name)]


def _is_watched(dispatcher_name: str) -> bool:
    name, _, overload = dispatcher_name.partition(".")
    namespace, _, base = name.partition("::")
    if namespace != "aten" or base in UNWATCHED or base.endswith("_backward"):
        return False
    if dispatcher_name.removeprefix("aten::") in UNWATCHED_OVERLOADS:
        return False
    arguments = torch._C._get_schema(name, overload).arguments
    written = [given for given in arguments if given.alias_info is not None and given.alias_info.is_write]
    is_in_place = base.endswith("_") and not base.endswith("__")
    if not written or not (is_in_place or any(given.kwarg_only for given in written)):
        return False
    tags = torch._C._get_operation_overload(name, overload)[2]
    return torch.Tag.inplace_view not in tags and torch.Tag.generated not in tags
