"""Programs that look odd but are right: no gradient, loss or weight becomes nan or infinite."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.numerics.corpus.programs import healthy, healthy_losses, train, train_in

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def zeros(*shape):
    return torch.zeros(*shape, requires_grad=True)


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def leaf(values, **options):
    return torch.tensor(values, requires_grad=True, **options)


def _rows():
    """Return data in which one row is padding."""
    x = torch.randn(3, 4)
    x[1] = 0
    return x.requires_grad_()


LOSSES = {
    "the_norm_of_a_row_of_padding": lambda: _rows().norm(dim=-1),
    "normalised_padding": lambda: functional.normalize(_rows(), dim=-1),
    "the_cosine_similarity_of_padding": lambda: functional.cosine_similarity(
        _rows(), torch.randn(3, 4), dim=-1
    ),
    "the_spread_of_a_constant_row": lambda: _rows().std(-1),
    "renormed_rows": lambda: torch.renorm(_rows(), 2, 0, 1.0),
    "a_cumulated_product_with_a_zero": lambda: _rows().cumprod(-1),
    "a_product_with_zeros": lambda: _rows().prod(-1),
    "sinc_at_zero": lambda: torch.sinc(zeros(3)),
    "the_sign_of_a_complex_zero": lambda: torch.sgn(
        torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    ).abs(),
    "a_power_of_tensors_at_zero": lambda: torch.pow(zeros(3), leaf([2.0, 3.0, 1.0])),
    "the_angle_of_two_zeros": lambda: torch.atan2(zeros(2), zeros(2)),
    "the_hypotenuse_of_zeros": lambda: functional.pairwise_distance(zeros(2, 3), torch.zeros(2, 3)),
    "xlogy_at_zero": lambda: torch.xlogy(torch.zeros(3), zeros(3) + 1),
    "a_kl_divergence_with_empty_classes": lambda: functional.kl_div(
        zeros(1, 2).log_softmax(-1), torch.tensor([[0.0, 1.0]]), reduction="batchmean"
    ),
    "a_binary_cross_entropy_at_certainty": lambda: functional.binary_cross_entropy(
        leaf([1.0, 0.0]), torch.tensor([1.0, 0.0])
    ),
    "a_mask_made_before_and_loaded": lambda: (
        (randn(2, 3) + torch.from_numpy(np.array([0.0, -np.inf, 0.0], dtype=np.float32))).softmax(-1).square()
    ),
    "a_masked_maximum_pooling": lambda: (
        randn(2, 4, 3)
        .masked_fill(~torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()[..., None], -math.inf)
        .amax(1)
    ),
    "a_max_pool_with_padding": lambda: functional.max_pool2d(randn(1, 1, 4, 4), 3, 1, 1),
    "missing_values_that_are_replaced": lambda: nn.Linear(2, 1)(
        torch.nan_to_num(torch.tensor([[1.0, math.nan], [math.inf, 2.0]]), nan=0.0, posinf=1.0)
    ),
    "a_mean_that_skips_nan": lambda: torch.nanmean(torch.tensor([1.0, math.nan, 3.0])) * ones(1),
    "an_infinite_norm": lambda: torch.linalg.vector_norm(randn(3), ord=math.inf),
    "the_log_of_zero_under_an_exponential": lambda: zeros(2).detach().log().exp() + ones(2),
    "a_division_that_is_clamped": lambda: (1 / torch.tensor([0.0, 2.0])).clamp(max=10.0) * ones(2),
    "a_sigmoid_by_hand_of_a_large_number": lambda: ones(2) / (1 + torch.exp(-torch.tensor([-200.0, 1.0]))),
    "distances_between_equal_points": lambda: torch.cdist(*2 * [ones(3, 2)]),
    "an_arctangent_of_a_large_half": lambda: leaf([300.0], dtype=torch.float16).atan(),
}
healthy_losses(LOSSES)


def a_mask_of_the_lowest_number_that_overflows_half():
    scores = torch.randn(2, 4).half().requires_grad_()
    mask = torch.zeros(2, 4)
    mask[:, 2:] = torch.finfo(torch.float32).min
    (scores + mask.half()).float().softmax(-1).square().sum().backward()


def a_buffer_filled_with_nan_until_it_is_written():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.empty(2))
            self.last.fill_(math.nan)
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            y = self.linear(x)
            self.last.copy_(y.detach()[0])
            return y

    model = Memory()
    model(torch.ones(2, 2)).sum().backward()
    model.last.fill_(math.nan)


def shortest_paths():
    distance = torch.full((4,), math.inf)
    distance[0] = 0
    for _ in range(3):
        distance[1:] = torch.minimum(distance[1:], distance[:-1] + 1.0)
    (ones(4) * distance).sum().backward()


def a_histogram_with_open_ends():
    edges = torch.tensor([-math.inf, 0.0, 1.0, math.inf])
    torch.bucketize(torch.randn(5), edges).sum().item()


def positions_in_buckets():
    positions = torch.log(torch.arange(4).float()).to(torch.long)
    torch.where(torch.arange(4) < 1, torch.arange(4), positions)


def ratios_of_which_empty_ones_are_chosen_away():
    hits, total = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])
    ratio = hits / total
    (torch.where(total > 0, ratio, 0.0) * ones(2)).sum().backward()


def a_perplexity_that_overflows_in_the_log():
    loss = nn.Linear(2, 1)(torch.ones(1, 2)).sum()
    loss.backward()
    (loss.detach() * 0 + 200).exp().item()


def trained(model, make_batch, *, steps=4, scaler=None, optimizer=None, context=None, lr=0.05):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    block = context or {**BF16, "enabled": False}
    train_in(block, lambda: model(make_batch()).float().square().mean(), optimizer, scaler, steps=steps)


def weights_that_grow_from_zero():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.zeros_(model[1].weight)
    batches = [(torch.ones(2, 4),)] * 10
    train(
        model, lambda x: (model(x) - 5).square().mean(), batches, torch.optim.Adam(model.parameters(), lr=0.1)
    )


def two_optimizers_in_turns():
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (one, two)]
    for step in range(4):
        loss = two(one(torch.randn(3, 4))).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        optimizers[step % 2].step()


def a_saliency_map_without_an_optimizer():
    model, x = nn.Linear(4, 1), randn(2, 4)
    for _ in range(4):
        model(x).sum().backward()


def checkpoints_in_both_forms():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = randn(2, 4)
    for reentrant in (False, True):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()


def a_lazy_model():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    model(x)
    trained(model, lambda: x)


def nested_tensors_of_both_layouts():
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
        nn.Linear(4, 4)(nested)


def a_hessian():
    torch.func.hessian(lambda x: (x**3).sum())(torch.randn(3))


def gradients_per_sample():
    model = nn.Linear(3, 1)
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(4, 3))


def a_branch_of_a_higher_order_op():
    x = torch.randn(4)
    torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), (x,))


def flexible_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 16)
    flex_attention(q, q, q)


def an_lstm_in_bf16():
    model = nn.LSTM(4, 8, batch_first=True)
    # oneDNN's LSTM in bf16 needs AVX512
    with torch.autocast(**BF16), torch.backends.mkldnn.flags(enabled=False):
        output, _ = model(torch.randn(2, 5, 4))
    output.float().square().mean().backward()


healthy(globals())
