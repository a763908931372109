"""Broken programs, each with its true cause, its line and its cure."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.corpus.programs import FP16, broken, train_in


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def at_least(least: float, x: torch.Tensor, fix: object) -> torch.Tensor:
    return x.clamp(min=least) if fix else x


def plus(eps: float, x: torch.Tensor, fix: object) -> torch.Tensor:
    return x + eps if fix else x


def from_a_file(shape: tuple[int, ...], *, at: tuple[int, ...], value: float) -> torch.Tensor:
    """Return numbers that no torch op has made. One of them is not finite."""
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    numbers[at] = value
    return torch.from_numpy(numbers)


def train(model, batch, *, lr=0.01, steps=4, optimizer=torch.optim.SGD, loss=None, **options):
    """Train on the same batch again and again."""
    optimizer = optimizer(model.parameters(), lr=lr, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(batch)
        (loss(output) if loss else output.float().square().mean()).backward()
        optimizer.step()


def finite_rows(rows, fix):
    return rows[rows.isfinite().all(1)] if fix else rows


@broken("data", op="addmm", cure="isfinite")
def a_row_of_a_batch_is_nan(fix):
    rows, model = from_a_file((12, 4), at=(9, 2), value=math.nan), nn.Linear(4, 1)
    for (loaded,) in DataLoader(TensorDataset(rows), batch_size=4):
        model(finite_rows(loaded, fix)).sum().backward()  # <-


@broken("data", op="addmm", cure="isfinite")
def features_from_a_file_hold_nan(fix):
    table = np.ones((5, 3), dtype=np.float32)
    table[2, 1] = np.nan
    if fix:
        table = np.nan_to_num(table)
    weight = torch.from_numpy(table)
    model = nn.Linear(3, 1)
    rows = functional.embedding(torch.tensor([1, 2]), weight)
    model(rows).sum().backward()  # <-


class Apply(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def backward_in_fp16(fix, batch, *layers):
    """Run a model in fp16. The suggested lines, if any, are pasted after the model is made."""
    model = nn.Sequential(*layers)
    fix(model)
    with torch.autocast(**FP16):
        loss = model(batch).float().mean()
    loss.backward()


@broken("range", op="cumsum", cure="paste")
def a_sum_over_a_long_sequence(fix):
    def positions(x):
        total = x.cumsum(1)  # <-
        return total / total[:, -1:]

    first = nn.Linear(4, 4, bias=False)
    nn.init.constant_(first.weight, 0.5)
    backward_in_fp16(fix, 3000 * torch.rand(2, 64, 4), first, Apply(positions))


@broken("range", op="convolution", cure="paste")
def a_convolution_of_raw_pixels(fix):
    model = nn.Sequential(nn.Conv2d(1, 4, 5, bias=False), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1))
    nn.init.constant_(model[0].weight, 1.0)
    fix(model)
    with torch.autocast(**FP16):
        loss = model(torch.full((1, 1, 8, 8), 60000.0)).float().mean()  # <-
    loss.backward()


@broken("range", op="add", cure="paste")
def a_residual_that_grows(fix):
    def residual(x):
        return (x + x) / 4  # <-

    backward_in_fp16(fix, torch.full((2, 4), 60000.0), nn.Linear(4, 4), Apply(residual), nn.Linear(4, 1))


@broken("range", op="_to_copy", cure=r"fp32|\.float\(\)")
def data_that_half_cannot_hold(fix):
    model = nn.Linear(2, 1)
    x = torch.tensor([[70000.0, 1.0]])
    narrow = x if fix else x.half()  # <-
    model(narrow.float()).sum().backward()


@broken("range", op="mm", cure="paste")
def a_recurrence_that_grows_before_any_step(fix):
    weight = nn.Parameter(2.0 * torch.eye(4) + 0.5)

    def grown(hidden):
        for _ in range(14):
            hidden = hidden @ weight  # <-
        return hidden / hidden.norm()

    backward_in_fp16(fix, torch.ones(2, 4), Apply(grown))


@broken("range", op="bmm", cure="paste")
def attention_in_a_checkpoint(fix):
    def attention(x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x  # <-

    layers = nn.Linear(16, 16), Apply(lambda x: checkpoint(attention, x, use_reentrant=False))
    backward_in_fp16(fix, 2000 * torch.randn(2, 5, 16), *layers)


@broken("range", op="square|pow", cure="paste")
def a_compiled_function_that_overflows(fix):
    @torch.compile(backend="eager")
    def energy(x):
        squares = x.pow(2)  # <-
        return squares / squares.sum()

    backward_in_fp16(fix, 2000 * torch.randn(3, 4), nn.Linear(4, 4), Apply(energy))


@broken("pole", op="div", cure=r"rsqrt\(")
def a_row_of_zeros_is_normalised_by_hand(fix):
    x = torch.zeros(2, 4, requires_grad=True)
    squares = x.square().sum(-1, keepdim=True)
    unit = x * (squares + 1e-12).rsqrt() if fix else x / squares.sqrt()  # <-
    unit.sum().backward()


@broken("pole", op="rsqrt", cure="eps|clamp")
def the_reciprocal_root_of_a_variance(fix):
    x = torch.ones(2, 4, requires_grad=True)
    variance = plus(1e-5, x.var(-1, keepdim=True), fix)
    (x * variance.rsqrt()).sum().backward()  # <-


@broken("pole", op="erfinv", cure="clamp")
def the_inverse_error_function_at_one(fix):
    u = leaf(1.0, 0.3).clamp(max=1 - 1e-6 if fix else 1.0)
    u.erfinv().sum().backward()  # <-


@broken("pole", op="atanh", cure="clamp")
def a_fisher_transform_of_a_full_correlation(fix):
    leaf(1.0, 0.5).clamp(max=0.999 if fix else 1.0).atanh().sum().backward()  # <-


@broken("pole", op="lgamma", cure="clamp|eps")
def the_log_of_gamma_at_zero(fix):
    x = plus(1e-3, leaf(0.0, 1.5), fix)
    x.lgamma().sum().backward()  # <-


@broken("pole", op="logit|log", cure="clamp|eps")
def the_logit_of_one(fix):
    leaf(1.0, 0.5).logit(eps=1e-6 if fix else None).sum().backward()  # <-


@broken("pole", op="", cure="clamp|eps")
def an_angle_between_equal_vectors(fix):
    cosine = (leaf(1.0, 0.0) * torch.tensor([1.0, 0.0])).sum()
    (cosine.clamp(max=1 - 1e-6) if fix else cosine).acos().backward()  # <-


@broken("pole", op="reciprocal|div", cure="eps|mask")
def a_weight_of_one_over_a_count(fix):
    weights = 1 / at_least(1, torch.tensor([3.0, 0.0]), fix)  # <-
    (leaf(1.0, 2.0) * weights).sum().backward()


@broken("domain", op="sqrt", cure="clamp")
def a_variance_that_rounding_made_negative(fix):
    x = torch.tensor([1e4, 1e4 + 1e-3, 1e4], requires_grad=True)
    variance = (x * x).mean() - x.mean() ** 2 - 20.0
    at_least(1e-6, variance, fix).sqrt().backward()  # <-


@broken("domain", op="acos", cure="clamp")
def the_angle_of_a_cosine_above_one(fix):
    cosine = leaf(1.0000002, 0.5).clamp(max=1 - 1e-6 if fix else 2.0)
    cosine.acos().sum().backward()  # <-


@broken("domain", op="pow", cure="clamp")
def a_fractional_power_of_a_negative_number(fix):
    (at_least(1e-6, leaf(-0.5, 2.0), fix) ** 1.5).sum().backward()  # <-


@broken("empty", op="var", cure="correction|few")
def the_spread_of_a_single_sample(fix):
    torch.ones(1, 4, requires_grad=True).var(0, correction=0 if fix else 1).sum().backward()  # <-


@broken("domain", op="log", cure="clamp")
def the_log_of_a_negative_return(fix):
    x = at_least(-0.99, leaf(-1.5, 0.5), fix)
    torch.log1p(x).sum().backward()  # <-


@broken("mask", op="softmax", cure="masked")
def padding_and_a_causal_mask_together(fix):
    scores = torch.randn(3, 3, requires_grad=True)
    causal = torch.ones(3, 3).triu(1).bool() | torch.tensor([True, False, False])
    hidden = torch.where(causal, torch.tensor(-1e4 if fix else -math.inf), scores)
    hidden.softmax(-1).square().sum().backward()  # <-


@broken("infinity", op="mul", cure="0 \\* inf|masked_fill|where")
def a_mask_that_is_multiplied(fix):
    scores, mask = torch.randn(2, 3, requires_grad=True), torch.tensor([1.0, 0.0, 1.0])
    bias = torch.zeros(3).masked_fill(mask == 0, -math.inf) if fix else (1 - mask) * -math.inf  # <-
    (scores + bias).softmax(-1).square().sum().backward()


@broken("infinity", op="sub", cure="inf - inf")
def a_softmax_by_hand_of_a_masked_row(fix):
    scores = torch.randn(2, 3, requires_grad=True)
    hidden = scores.masked_fill(torch.tensor([[True], [False]]), -1e4 if fix else -math.inf)
    weights = (hidden - hidden.amax(-1, keepdim=True)).exp()  # <-
    (weights / weights.sum(-1, keepdim=True)).square().sum().backward()


class NumpyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, safe):
        ctx.save_for_backward(x)
        ctx.safe = safe
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with np.errstate(divide="ignore"):
            slope = torch.from_numpy(0.5 / np.sqrt(x.detach().numpy() + (1e-6 if ctx.safe else 0.0)))
        return torch.from_numpy(grad.numpy() * slope.numpy()), None


@broken("function", op="NumpyBackward", cure="NumpyBackward")
def a_function_whose_gradient_comes_from_numpy(fix):
    weight = leaf(0.0, 2.0)
    y = NumpyBackward.apply(weight * 1.0, bool(fix))  # <-
    y.sum().backward()


@broken("weight", op="addmm", cure="checkpoint|initialised")
def a_checkpoint_with_a_nan(fix):
    model = nn.Linear(4, 2)
    state = {"weight": from_a_file((2, 4), at=(0, 0), value=math.nan), "bias": torch.zeros(2)}
    if not fix:
        model.load_state_dict(state)
    train(model, torch.ones(3, 4))


@broken("unwritten", op="empty", cure="zeros")
def a_buffer_that_nobody_wrote(fix):
    bias = torch.zeros(4) if fix else torch.empty(4)  # <-
    if not fix:
        bias.numpy()[:] = math.nan  # what memory may hold
    (leaf(1.0, 2.0, 3.0, 4.0) + bias).sum().backward()


@broken("constant", op="fill|full|masked_fill|index_put", cure="nan")
def a_sentinel_of_nan_that_reaches_the_loss(fix):
    output = leaf(1.0, 2.0)
    target = torch.tensor([1.0, 0.0])
    target = target.masked_fill(target == 0, math.nan)  # <-
    if fix:
        output, target = output[target.isfinite()], target[target.isfinite()]
    (output - target).square().mean().backward()


@broken("divergence", op="", cure="learning rate")
def a_divergence_that_fp16_shows_first(fix):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5 if fix else 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    train_in(FP16, lambda: model(10 * torch.ones(8, 4)).float().square().mean(), optimizer, scaler, steps=20)


@broken("divergence", op="", cure="learning rate")
def an_adam_with_an_absurd_learning_rate(fix):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    train(model, torch.randn(8, 4), lr=1e-3 if fix else 1e8, steps=10, optimizer=torch.optim.Adam)


@broken("divergence", op="", cure="learning rate")
def a_recurrent_model_that_explodes_after_some_steps(fix):
    torch.manual_seed(0)
    model = nn.RNN(4, 8, nonlinearity="relu", batch_first=True)
    train(model, torch.randn(2, 12, 4), lr=1e-6 if fix else 0.3, steps=20, loss=lambda y: -y[0].sum())


@broken("lost updates", op="", cure="fp32|stochastic|store_weights|weights=")
def adamw_on_bf16_weights(fix):
    torch.manual_seed(0)
    model = nn.Linear(32, 32, dtype=torch.float32 if fix else torch.bfloat16)
    nn.init.normal_(model.weight, std=1.0)
    x = torch.randn(8, 32, dtype=model.weight.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(6):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()  # <-


@broken("no step", op="", cure="step")
def a_loop_that_never_steps(fix):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        if fix:
            optimizer.step()


@broken("pole", op="log", cure="clamp|eps")
def a_model_under_data_parallel_wrappers(fix):
    class Probabilities(nn.Module):
        def forward(self, x):
            return (x.relu() + (1e-6 if fix else 0.0)).log()  # <-

    model = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), Probabilities()))
    torch.nn.init.constant_(model.module[0].weight, -1.0)
    train(model, torch.ones(2, 4), loss=lambda y: -y.mean())


BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def near_one(loss_of, fix, block):
    """Train a layer on a loss of probabilities close to 1."""
    net, x = nn.Linear(8, 4), 8 * torch.randn(64, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    fix(net)
    train_in(block, lambda: loss_of(net(x)).float().mean(), optimizer, steps=2)


@broken("digits", op="log1p", cure="paste")
def a_clamp_below_1_rounds_to_1_in_bf16(fix):
    def loss(h):
        return 1 - torch.log1p(-h.sigmoid().clamp(max=1.0 - 1e-6)).sum(-1).exp()  # <-

    near_one(loss, fix, BF16)


@broken("digits", op="log", cure="paste")
def a_focal_loss_with_an_eps_that_bf16_has_not(fix):
    def loss(h):
        p = h.sigmoid().clamp(1e-4, 1 - 1e-4)
        return -(1 - p).log() * p**2  # <-

    near_one(loss, fix, BF16)


@broken("digits", op="atanh", cure="paste")
def the_inverse_of_a_squashed_action_in_fp16(fix):
    def loss(h):
        return torch.atanh(h.tanh().clamp(-1 + 1e-5, 1 - 1e-5)).square()  # <-

    near_one(loss, fix, FP16)


@broken("digits", op="div", cure="paste")
def the_odds_of_a_probability_in_bf16(fix):
    def loss(h):
        p = torch.clamp(h.sigmoid(), max=1 - 1e-5)
        return (p / (1 - p)).log1p()  # <-

    near_one(loss, fix, BF16)
