"""Programs whose fault or oddity is rare: as users of PyTorch write them, without a look at the diagnosis."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.programs import broken, healthy


def train(model: nn.Module, loss_of, batches, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()


@broken("size", op="rnn|mm", cure=r"recurr|hidden|weight_hh|initial|sequence|step")
def a_relu_rnn_that_grows_along_a_long_sequence(fix):
    encoder = nn.RNN(4, 16, nonlinearity="relu", batch_first=True)
    head = nn.Linear(16, 1)
    with torch.no_grad():
        encoder.weight_hh_l0.copy_(torch.eye(16) * (0.9 if fix else 2.0))

    def loss_of(x):
        states, _ = encoder(x)  # <-
        return head(states[:, -1]).square().mean()

    train(nn.ModuleList([encoder, head]), loss_of, [(torch.rand(2, 150, 4) * 0.1,)] * 2)


@broken("domain", op="logdet|log", cure=r"slogdet|negative|det")
def an_invertible_convolution_with_a_negative_determinant(fix):
    weight = torch.linalg.qr(torch.randn(4, 4))[0]
    if weight.det() > 0:
        weight[0] *= -1
    mixing = nn.Parameter(weight)
    scale = nn.Linear(4, 4)
    model = nn.ParameterList([mixing, *scale.parameters()])

    def loss_of(x):
        log_scale = torch.tanh(scale(x))
        z = (x @ mixing) * log_scale.exp()
        log_determinant = torch.linalg.slogdet(mixing).logabsdet if fix else torch.logdet(mixing)  # <-
        return (0.5 * z.square().sum(1) - log_scale.sum(1)).mean() - log_determinant

    train(model, loss_of, [(torch.randn(8, 4),)] * 2)


@broken("pole", op="sqrt", cure=r"sqrt|eps|0")
def a_laplacian_at_the_origin(fix):
    class Heat(nn.Module):
        """A solution in polar coordinates: the network sees the radius."""

        def __init__(self, eps):
            super().__init__()
            self.net, self.eps = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)), eps

        def forward(self, points):
            # infinite slope at the origin
            radius = torch.sqrt((points**2).sum(-1, keepdim=True) + self.eps)  # <-
            return self.net(radius)

    model = Heat(1e-4 if fix else 0.0)
    grid = torch.linspace(-1, 1, 5)
    points = torch.cartesian_prod(grid, grid)

    def loss_of(points):
        points = points.clone().requires_grad_()
        u = model(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        laplacian = sum(
            torch.autograd.grad(slope[:, axis].sum(), points, create_graph=True)[0][:, axis]
            for axis in (0, 1)
        )
        return (laplacian - 1).square().mean()

    train(model, loss_of, [(points,)] * 2, torch.optim.Adam(model.parameters(), lr=1e-3))


@broken("no step", cure=r"item\(\)|torch\.tensor|new tensor")
def a_loss_that_was_wrapped_in_a_new_tensor(fix):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(6):
        x = torch.randn(8, 4)
        losses = [F.mse_loss(model(part), part.sum(1, keepdim=True)) for part in x.split(4)]
        if fix:
            loss = torch.stack(losses).mean()
        else:
            loss = torch.tensor([loss.item() for loss in losses], requires_grad=True).mean()  # <-
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@broken("domain", op="ctc", cure=r"zero_infinity|longer|shorter|length")
def speech_shorter_than_its_transcript(fix):
    model = nn.Sequential(nn.Conv1d(8, 16, 3, stride=2), nn.ReLU(), nn.Conv1d(16, 12, 3, stride=2))
    frames, lengths = torch.randn(2, 8, 40), torch.tensor([9, 3])
    transcripts = torch.randint(1, 12, (2, 6))

    def loss_of(frames):
        log_probabilities = model(frames).log_softmax(1).permute(2, 0, 1)
        spoken = torch.tensor([3, 6])
        return F.ctc_loss(log_probabilities, transcripts, lengths, spoken, zero_infinity=bool(fix))  # <-

    train(model, loss_of, [(frames,)] * 2)


@broken("pole", op="eigh", cure=r"eigenvalue|equal|repeated|degenerate")
def whitening_by_eigenvectors_of_dead_features(fix):
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with torch.no_grad():
        body[0].bias[5:] = -50  # three features that are always 0

    def loss_of(x):
        h = body(x)
        h = h - h.mean(0)
        covariance = h.T @ h / len(h) + 1e-3 * torch.eye(8)
        if fix:
            white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), h.T, upper=False).T
        else:
            values, vectors = torch.linalg.eigh(covariance)  # <-
            white = h @ vectors * values.rsqrt()
        return (white - 1).abs().mean()

    train(body, loss_of, [(torch.randn(32, 4),)] * 2)


@broken("data", op="addmm", cure=r"running|buffer|data|batch")
def running_statistics_that_a_skipped_batch_has_poisoned(fix):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    inputs, labels = torch.randn(40, 4), torch.randint(0, 2, (40,))
    inputs[19, 2] = math.inf
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in DataLoader(TensorDataset(inputs, labels), batch_size=8):
        if fix and not x.isfinite().all():
            continue
        loss = F.cross_entropy(model(x), y)
        if not loss.isfinite():
            continue  # "the batch is bad, leave it out"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(
            "validation", F.cross_entropy(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long)).item()
        )


@healthy
def a_second_head_that_is_nan_and_not_in_the_loss():
    body, head, ratio = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    unused = []

    def loss_of(x):
        h = body(x).relu()
        unused.append(ratio(h) / torch.zeros(1) - ratio(h) / torch.zeros(1))
        return head(h).square().mean()

    train(nn.ModuleList([body, head]), loss_of, [(torch.randn(8, 4),)] * 4)


@healthy
def a_loss_scale_that_grows_until_it_overflows_now_and_then():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
    skipped = 0
    for step in range(25):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        if step > 18 and scaler.get_scale() >= before:
            break  # do not end on a skipped step
    assert skipped


@healthy
def logits_adjusted_by_the_log_prior_of_an_absent_class():
    counts = torch.tensor([5.0, 3.0, 0.0, 8.0])
    log_prior = (counts / counts.sum()).log()  # -inf for the third
    model = nn.Linear(6, 4)
    labels = torch.tensor([0, 1, 3, 3, 0, 3])
    train(model, lambda x: F.cross_entropy(model(x) + log_prior, labels), [(torch.randn(6, 6),)] * 4)


@healthy
def a_frozen_backbone_in_bf16_under_a_head_that_learns():
    backbone = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32)).bfloat16().requires_grad_(False)
    head = nn.Linear(32, 2)
    optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-3)
    x, y = torch.randn(16, 8, dtype=torch.bfloat16), torch.randint(0, 2, (16,))
    train(head, lambda x, y: F.cross_entropy(head(backbone(x).float()), y), [(x, y)] * 5, optimizer)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@healthy
def an_adapter_that_begins_at_zero_in_fp16():
    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 4)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(torch.randn(16, 8)).float(), torch.arange(16) % 4)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@healthy
def fp16_gradients_that_are_zero_for_the_relu_is_dead():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].bias[:24] = -40
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(16, 8)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@healthy
def many_micro_batches_before_the_first_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(16):
        (model(torch.randn(2, 4)).square().mean() / 8).backward()
        if step % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def a_square_root_behind_relu_whose_infinite_slope_relu_hides():
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    train(
        nn.ModuleList([first, second]),
        lambda x: second(torch.sqrt(first(x).relu())).square().mean(),
        [(torch.randn(8, 4),)] * 4,
    )
