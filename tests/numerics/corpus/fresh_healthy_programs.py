"""Healthy programs that look odd but are right, written without knowledge of how the diagnosis works."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.corpus.programs import FP16, healthy, train, train_in


def fresh_a_causal_mask_of_infinities_in_a_buffer():
    model = nn.Linear(16, 48)
    model.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def loss_of():
        q, k, v = model(torch.randn(2, 8, 16)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4 + model.mask
        return (scores.softmax(-1) @ v).float().square().mean()

    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train_in(FP16, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-3), scaler, steps=4)


def fresh_a_second_head_that_is_nan_and_not_in_the_loss():
    body, head, ratio = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    unused = []

    def loss_of(x):
        h = body(x).relu()
        unused.append(ratio(h) / torch.zeros(1) - ratio(h) / torch.zeros(1))
        return head(h).square().mean()

    train(nn.ModuleList([body, head]), loss_of, [(torch.randn(8, 4),)] * 4)


def fresh_distances_with_a_double_where():
    encoder = nn.Linear(3, 4)

    def loss_of(x):
        z = encoder(x)
        squares = (z[:, None] - z[None]).square().sum(-1)  # 0 on the diagonal
        apart = squares > 0
        distance = torch.where(
            apart, torch.where(apart, squares, torch.ones_like(squares)).sqrt(), squares * 0
        )
        return F.relu(1 - distance).mean()

    train(encoder, loss_of, [(torch.randn(6, 3),)] * 4)


def fresh_early_stopping_that_begins_at_infinity():
    model = nn.Linear(4, 1)
    best, waited = torch.tensor(math.inf), 0
    history = torch.full((8,), math.nan)
    for epoch in range(8):
        train(model, lambda x: model(x).square().mean(), [(torch.randn(8, 4),)] * 2)
        with torch.no_grad():
            validation = model(torch.randn(8, 4)).square().mean()
        history[epoch] = validation
        improved = best - validation > 1e-4
        best, waited = torch.minimum(best, validation), 0 if improved else waited + 1
        if waited > 3:
            break
    assert history.nanmean().isfinite()


def fresh_the_first_steps_skipped_by_a_large_loss_scale():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    for _ in range(16):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def fresh_a_loss_scale_that_grows_until_it_overflows_now_and_then():
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
            break  # so that the last step is not skipped
    assert skipped


def fresh_labels_padded_with_nan_that_are_selected_before_the_loss():
    inputs, targets = torch.randn(32, 5), torch.randn(32, 3)
    targets[torch.rand(32, 3) < 0.2] = math.nan
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss_of(x, y):
        known = ~y.isnan()
        return F.mse_loss(model(x)[known], y[known])

    train(model, loss_of, DataLoader(TensorDataset(inputs, targets), batch_size=8))


def fresh_missing_features_with_an_indicator():
    inputs, targets = torch.randn(32, 5), torch.randn(32, 1)
    inputs[torch.rand(32, 5) < 0.2] = math.nan
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss_of(x, y):
        missing = x.isnan()
        return F.mse_loss(model(torch.cat([x.masked_fill(missing, 0), missing.float()], dim=1)), y)

    train(model, loss_of, DataLoader(TensorDataset(inputs, targets), batch_size=8))


def fresh_logits_adjusted_by_the_log_prior_of_an_absent_class():
    counts = torch.tensor([5.0, 3.0, 0.0, 8.0])
    log_prior = (counts / counts.sum()).log()  # -inf for the third
    model = nn.Linear(6, 4)
    labels = torch.tensor([0, 1, 3, 3, 0, 3])
    train(model, lambda x: F.cross_entropy(model(x) + log_prior, labels), [(torch.randn(6, 6),)] * 4)


def fresh_a_graph_convolution_that_clears_the_infinite_degree():
    linear = nn.Linear(4, 2)
    source, target = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])

    def loss_of(x):
        degree = torch.zeros(6).index_add(0, target, torch.ones(4))
        scale = degree.pow(-0.5)
        scale[scale == math.inf] = 0
        messages = linear(x * scale[:, None])[source]
        return (torch.zeros(6, 2).index_add(0, target, messages) * scale[:, None]).square().mean()

    train(linear, loss_of, [(torch.randn(6, 4),)] * 4)


def fresh_neighbours_reduced_by_a_maximum_from_minus_infinity():
    linear = nn.Linear(4, 3)
    target = torch.tensor([0, 0, 1, 3, 3])  # nobody writes to nodes 2 and 4

    def loss_of(x):
        messages = linear(x)
        pooled = torch.full((5, 3), -math.inf).scatter_reduce(
            0, target[:, None].expand(5, 3), messages, "amax"
        )
        pooled = torch.where(pooled.isinf(), torch.zeros_like(pooled), pooled)
        return pooled.square().mean()

    train(linear, loss_of, [(torch.randn(5, 4),)] * 4)


def fresh_speech_shorter_than_its_transcript_with_zero_infinity():
    model = nn.Conv1d(8, 12, 3, stride=2)
    transcripts = torch.randint(1, 12, (2, 6))

    def loss_of(frames):
        log_probabilities = model(frames).log_softmax(1).permute(2, 0, 1)
        lengths = torch.tensor([9, 3]), torch.tensor([3, 6])
        return F.ctc_loss(log_probabilities, transcripts, *lengths, zero_infinity=True)

    train(model, loss_of, [(torch.randn(2, 8, 20),)] * 4)


def fresh_a_crf_whose_paths_begin_in_one_state():
    emissions, transitions = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 3))
    start = torch.tensor([0.0, -math.inf, -math.inf])

    def loss_of(x, tags):
        scores = emissions(x)
        alpha = start + scores[0]
        for step in scores[1:]:
            alpha = torch.logsumexp(alpha[:, None] + transitions, dim=0) + step
        path = scores[torch.arange(len(x)), tags].sum() + transitions[tags[:-1], tags[1:]].sum()
        return torch.logsumexp(alpha, 0) - path

    model = nn.ParameterList([*emissions.parameters(), transitions])
    train(model, loss_of, [(torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0]))] * 4)


def fresh_samples_from_the_top_k_logits_between_the_steps():
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    tokens = torch.randint(0, 20, (4, 6))
    for _ in range(4):
        train(
            model, lambda t: F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()), [(tokens,)]
        )
        with torch.no_grad():
            logits = model(tokens[:, -1]) / 0.7
            smallest = logits.topk(5).values[:, -1:]
            torch.multinomial(logits.masked_fill(logits < smallest, -math.inf).softmax(-1), 1)


def fresh_an_accuracy_per_class_that_is_logged_as_nan():
    model = nn.Linear(4, 3)
    log = []
    for _ in range(4):
        x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))  # no target is the third class
        train(model, lambda x, y: F.cross_entropy(model(x), y), [(x, y)])
        with torch.no_grad():
            right = F.one_hot(y, 3) * (model(x).argmax(1) == y)[:, None]
            per_class = right.sum(0) / F.one_hot(y, 3).sum(0)
        log.append(f"{per_class.nanmean().item():.2f} {per_class.tolist()}")
    assert "nan" in log[-1]


def fresh_a_frozen_backbone_in_bf16_under_a_head_that_learns():
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


def fresh_an_adapter_that_begins_at_zero_in_fp16():
    model = nn.Sequential(LoRA(nn.Linear(8, 16)), nn.ReLU(), LoRA(nn.Linear(16, 4)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    labels = torch.arange(16) % 4
    train_in(
        FP16, lambda: F.cross_entropy(model(torch.randn(16, 8)).float(), labels), optimizer, scaler, steps=5
    )


def fresh_fp16_gradients_that_are_zero_for_the_relu_is_dead():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[0].bias[:24] = -40
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train_in(FP16, lambda: model(torch.randn(16, 8)).float().square().mean(), optimizer, steps=5)


def fresh_many_micro_batches_before_the_first_step():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(16):
        (model(torch.randn(2, 4)).square().mean() / 8).backward()
        if step % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()


def fresh_weights_in_bf16_during_a_warm_up_from_nothing():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step / 10) ** 3))
    for _ in range(16):
        x = torch.randn(16, 8, dtype=torch.bfloat16)
        loss = (model(x) - x.sum(1, keepdim=True)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def fresh_a_step_that_the_loop_itself_leaves_out_for_its_nan():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(6):
        x = torch.randn(8, 4)
        loss = (model(x).square().mean() + (math.inf if index == 3 else 0.0)).log1p()
        if not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fresh_headings_of_objects_that_stand_still():
    motion = nn.LSTM(2, 8, batch_first=True)
    velocity = nn.Linear(8, 2, bias=False)
    moves = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])[:, None]

    def loss_of(tracks):
        states, _ = motion(tracks)
        v = velocity(states[:, -1]) * moves
        heading = torch.atan2(v[:, 1], v[:, 0])  # torch defines the gradient at (0, 0) as zero
        return heading.sin().square().mean()

    train(nn.ModuleList([motion, velocity]), loss_of, [(torch.randn(6, 5, 2),)] * 4)


def fresh_a_square_root_behind_relu_whose_infinite_slope_relu_hides():
    first, second = nn.Linear(4, 8), nn.Linear(8, 1)
    train(
        nn.ModuleList([first, second]),
        lambda x: second(torch.sqrt(first(x).relu())).square().mean(),
        [(torch.randn(8, 4),)] * 4,
    )


healthy(globals())
