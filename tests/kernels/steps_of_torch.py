"""Calls ``step_`` with the arguments of torch's fused kernels: lists of tensors, and options by name."""


def adam_(
    ops,
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    largest,
    steps,
    remainders,
    *,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    decoupled_weight_decay,
    maximize,
    lr_tensor=None,
    **late,
):
    """Take a step of Adam or AdamW with the given ``step_``. With ``largest`` it is AMSGrad."""
    rule = "adam_amsgrad" if largest else "adam"
    states = [*exp_avgs, *exp_avg_sqs, *largest]
    numbers = [lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, maximize]
    return ops.step_(params, grads, states, steps, remainders, rule, numbers, lr=lr_tensor, **late)


def sgd_(
    ops,
    params,
    grads,
    buffers,
    remainders,
    *,
    lr,
    momentum,
    dampening,
    weight_decay,
    nesterov,
    maximize,
    lr_tensor=None,
    **late,
):
    """Take a step of SGD with the given ``step_``."""
    rule = "sgd_momentum" if momentum else "sgd"
    numbers = [lr, momentum, dampening, weight_decay, nesterov, maximize]
    return ops.step_(params, grads, buffers, [], remainders, rule, numbers, lr=lr_tensor, **late)
