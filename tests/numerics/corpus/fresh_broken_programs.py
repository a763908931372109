"""Broken programs as users write them, made without knowledge of how the diagnosis works."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.numerics.corpus.programs import FP16, broken, train, train_in


@broken("data", cure=r"row|batch|sample|data")
def fresh_prices_whose_log_was_taken_in_numpy(fix):
    generator = np.random.default_rng(0)
    prices = generator.uniform(1, 100, size=(64, 1)).astype(np.float32)
    prices[41] = 0
    features = generator.normal(size=(64, 6)).astype(np.float32)
    if fix:
        features, prices = features[prices[:, 0] > 0], prices[prices[:, 0] > 0]
    with np.errstate(divide="ignore"):
        targets = np.log(prices)
    loader = DataLoader(TensorDataset(torch.from_numpy(features), torch.from_numpy(targets)), batch_size=8)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    train(model, lambda x, y: F.mse_loss(model(x), y), loader)


@broken("pole", op="div", cure=r"0|eps|divi")
def fresh_images_standardised_one_by_one_of_which_one_is_black(fix):
    class Images(list):
        def __getitem__(self, index):
            image = super().__getitem__(index).float() / 255
            return (image - image.mean()) / (image.std() + (1e-6 if fix else 0)), index % 3  # <-

    images = Images(torch.randint(0, 256, (24, 1, 8, 8), dtype=torch.uint8))
    images[13:14] = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    train(model, lambda x, y: F.cross_entropy(model(x), y), DataLoader(images, batch_size=6))


@broken("data", cure=r"mask|where")
def fresh_missing_labels_that_are_masked_after_the_loss(fix):
    inputs, targets = torch.randn(32, 5), torch.randn(32, 3)
    targets[torch.rand(32, 3) < 0.2] = math.nan
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss_of(x, y):
        known = ~y.isnan()
        if fix:
            y = y.nan_to_num()
        # where() below hides the nan, but not its gradient
        error = (model(x) - y) ** 2  # <-
        return torch.where(known, error, torch.zeros_like(error)).sum() / known.sum()

    train(model, loss_of, DataLoader(TensorDataset(inputs, targets), batch_size=8))


@broken("range", op="mul|mm", cure="paste")
def fresh_contrastive_logits_of_features_that_nobody_normalised(fix):
    image, text = (nn.Sequential(nn.Linear(n, 64), nn.GELU(), nn.Linear(64, 64)) for n in (32, 16))
    logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    model = nn.ParameterList([*image.parameters(), *text.parameters(), logit_scale])
    fix(model)

    def loss_of():
        images, texts = image(torch.randn(16, 32) * 60), text(torch.randn(16, 16) * 60)
        logits = logit_scale.exp() * (images @ texts.T)  # <-
        return F.cross_entropy(logits, torch.arange(16)) + F.cross_entropy(logits.T, torch.arange(16))

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # found within 16 steps
    train_in(FP16, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-4), scaler, steps=16)


@broken("mask", op="softmax", cure=r"mask|-inf")
def fresh_attention_pooling_of_an_empty_document(fix):
    embedding = nn.Embedding(50, 16, padding_idx=0)
    score, head = nn.Linear(16, 1), nn.Linear(16, 2)
    model = nn.ModuleList([embedding, score, head])
    tokens = torch.randint(1, 50, (8, 12))
    for row, length in enumerate([12, 3, 7, 0, 9, 1, 12, 5]):
        tokens[row, length:] = 0

    def loss_of(tokens, labels):
        states = embedding(tokens)
        scores = score(states).squeeze(-1)
        lowest = torch.finfo(scores.dtype).min if fix else -math.inf
        weights = scores.masked_fill(tokens == 0, lowest).softmax(dim=-1)  # <-
        return F.cross_entropy(head((weights.unsqueeze(-1) * states).sum(1)), labels)

    train(model, loss_of, [(tokens, torch.randint(0, 2, (8,)))] * 2)


@broken("pole", op="div", cure=r"SoftSign|backward|own derivative")
def fresh_a_function_whose_own_derivative_divides_by_its_input(fix):
    class SoftSign(torch.autograd.Function):
        """x / (1 + |x|), with the derivative y**2 / x**2, which was simplified on paper."""

        @staticmethod
        def forward(ctx, x):
            y = x / (1 + x.abs())
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, gradient):
            x, y = ctx.saved_tensors
            # 0 / 0 where x is 0
            return gradient * (y / x) ** 2  # <-

    project, head = nn.Linear(6, 12, bias=False), nn.Linear(12, 1)
    activation = F.softsign if fix else SoftSign.apply
    x = torch.randn(16, 6)
    x[4:] *= torch.rand(12, 1) > 0.3  # some inputs are padding
    train(nn.ModuleList([project, head]), lambda x: head(activation(project(x))).square().mean(), [(x,)] * 2)


class NumpyPinball(torch.autograd.Function):
    """A quantile loss in relative units, computed in NumPy."""

    @staticmethod
    def forward(ctx, prediction, target, safe):
        p, t = prediction.detach().numpy(), target.numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = (t - p) / np.maximum(np.abs(t), 1e-3 if safe else 0)
        ctx.save_for_backward(torch.from_numpy(np.where(relative > 0, -0.9, 0.1)).float())
        return torch.tensor(np.maximum(0.9 * relative, -0.1 * relative).mean())

    @staticmethod
    def backward(ctx, gradient):
        (slope,) = ctx.saved_tensors
        return gradient * slope / slope.numel(), None, None


@broken("function", op="", cure=r"NumPy|NumpyPinball|function")
def fresh_a_quantile_loss_in_numpy(fix):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    targets = torch.randn(16, 1)
    targets[5] = 0

    def loss_of(x):
        return NumpyPinball.apply(model(x), targets, bool(fix))  # <-

    train(model, loss_of, [(torch.randn(16, 4),)] * 2)


@broken("pole", op="log", cure=r"log_softmax|log of 0")
def fresh_a_compiled_model_with_the_log_of_a_softmax(fix):
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))

    @torch.compile
    def loss_of(x, one_hot):
        logits = model(x)
        if fix:
            return -(F.log_softmax(logits, dim=-1) * one_hot).sum(-1).mean()
        return -(torch.softmax(logits, dim=-1).log() * one_hot).sum(-1).mean()  # <-

    batches = [(torch.randn(8, 10) * 10**power, F.one_hot(torch.arange(8) % 5, 5)) for power in range(4)]
    train(model, loss_of, batches)


@broken("pole", op="sqrt", cure=r"sqrt|eps")
def fresh_a_checkpointed_bilinear_pooling_with_a_signed_root(fix):
    body, head = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU()), nn.Linear(36, 3)
    with torch.no_grad():
        body[0].bias[0] = -9  # a dead channel

    def pooling(images):
        features = body(images).flatten(2)
        pooled = (features @ features.transpose(1, 2) / features.shape[-1]).flatten(1)
        root = torch.sqrt(pooled.abs() + (1e-6 if fix else 0))  # <-
        return F.normalize(pooled.sign() * root, dim=1)

    def loss_of(images, labels):
        return F.cross_entropy(head(checkpoint(pooling, images, use_reentrant=False)), labels)

    train(nn.ModuleList([body, head]), loss_of, [(torch.randn(4, 1, 6, 6), torch.arange(4) % 3)] * 2)


@broken("divergence", cure=r"learning rate|clip|diverg")
def fresh_a_cnn_with_a_learning_rate_for_another_model(fix):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 1)
    )
    images, targets = torch.randn(16, 3, 8, 8), torch.randn(16, 1) * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 if fix else 5.0, momentum=0.9)
    train(model, lambda x, y: F.mse_loss(model(x), y), [(images, targets)] * 80, optimizer)


@broken("size", op="rnn|mm", cure=r"recurr|hidden|weight_hh|initial|sequence|step")
def fresh_a_relu_rnn_that_grows_along_a_long_sequence(fix):
    encoder = nn.RNN(4, 16, nonlinearity="relu", batch_first=True)
    head = nn.Linear(16, 1)
    with torch.no_grad():
        encoder.weight_hh_l0.copy_(torch.eye(16) * (0.9 if fix else 2.0))

    def loss_of(x):
        states, _ = encoder(x)  # <-
        return head(states[:, -1]).square().mean()

    train(nn.ModuleList([encoder, head]), loss_of, [(torch.rand(2, 150, 4) * 0.1,)] * 2)


@broken("pole", op="log", cure=r"log of 0|logsigmoid|with_logits|clamp")
def fresh_a_gan_whose_discriminator_has_won(fix):
    generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.1)
    for _ in range(20):
        # pixels without normalization
        real, fake = torch.rand(16, 4) * 255, generator(torch.randn(16, 2)) * 127 + 128
        real = real.sort(dim=1).values  # and easy to tell apart
        logits = discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(16, 1), torch.zeros(16, 1)])
        of_discriminator.zero_grad()
        F.binary_cross_entropy_with_logits(logits, truth).backward()
        of_discriminator.step()

        on_fake = discriminator(fake)
        truth_of_fake = on_fake.sigmoid()
        log_truth = F.logsigmoid(on_fake) if fix else truth_of_fake.log()  # <-
        loss = -log_truth.mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()


@broken("pole", op="sqrt|pow", cure=r"sqrt|eps")
def fresh_a_gradient_penalty_with_a_hand_written_norm(fix):
    critic = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    with torch.no_grad():
        critic[2].bias.fill_(-0.6)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for _ in range(2):
        real, fake = torch.randn(32, 3) * 0.3, torch.randn(32, 3) * 0.3
        share = torch.rand(32, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        norm = torch.sqrt((slopes**2).sum(1) + (1e-12 if fix else 0))  # <-
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((norm - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@broken("pole", op="div", cure=r"0|eps|clamp|divi|empty")
def fresh_supervised_contrast_where_a_class_has_one_sample(fix):
    encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])

    def loss_of(x):
        z = F.normalize(encoder(x), dim=1)
        itself = torch.eye(len(x), dtype=torch.bool)
        similarity = (z @ z.T / 0.1).masked_fill(itself, -1e9)
        log_probability = similarity - similarity.logsumexp(1, keepdim=True)
        positives = (labels[:, None] == labels[None]) & ~itself
        mean = (log_probability * positives).sum(1) / positives.sum(1).clamp(min=1 if fix else 0)  # <-
        return -mean.mean()

    train(encoder, loss_of, [(torch.randn(8, 8),)] * 2)


@broken("size", op="exp", cure=r"logsumexp|subtract|softmax|max")
def fresh_info_nce_written_with_exp(fix):
    encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def loss_of(x):
        z = F.normalize(encoder(x), dim=1)
        pairs = F.normalize(encoder(x + 0.01 * torch.randn_like(x)), dim=1)
        logits = z @ pairs.T / 0.01
        if fix:
            return F.cross_entropy(logits, torch.arange(len(x)))
        similarity = torch.exp(logits)  # <-
        return -torch.log(similarity.diag() / similarity.sum(1)).mean()

    train(encoder, loss_of, [(torch.randn(8, 8),)] * 2)


@broken("empty", op="std", cure=r"one|1|unbiased|correction|drop_last")
def fresh_advantages_of_a_last_batch_of_one(fix):
    states, actions, returns = torch.randn(17, 4), torch.randint(0, 2, (17,)), torch.randn(17)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    loader = DataLoader(TensorDataset(states, actions, returns), batch_size=8, drop_last=bool(fix))

    def loss_of(state, action, advantage):
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # <-
        chosen = F.log_softmax(policy(state), dim=-1).gather(1, action[:, None]).squeeze(1)
        return -(chosen * advantage).mean()

    train(policy, loss_of, loader)


@broken("size", op="exp", cure=r"exp|clamp")
def fresh_a_clipped_ppo_ratio_that_overflows_behind_the_clip(fix):
    policy = nn.Linear(3, 4)
    old = torch.full((6,), -120.0)

    def loss_of(state, action, advantage):
        new = F.log_softmax(policy(state), dim=-1).gather(1, action[:, None]).squeeze(1)
        ratio = ((new - old).clamp(max=20) if fix else new - old).exp()  # <-
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    train(policy, loss_of, [(torch.randn(6, 3), torch.randint(0, 4, (6,)), torch.rand(6) + 0.1)] * 2)


@broken("lost updates", cure=r"fp32|float32|master|stochastic|Kahan")
def fresh_a_transformer_cast_to_bf16_before_the_optimizer(fix):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    if not fix:
        layer.bfloat16()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-5)
    dtype = torch.float32 if fix else torch.bfloat16
    block = {"device_type": "cpu", "dtype": torch.bfloat16, "enabled": bool(fix)}
    train_in(
        block, lambda: layer(torch.randn(2, 5, 16, dtype=dtype)).float().square().mean(), optimizer, steps=6
    )


@broken("underflow", cure=r"GradScaler|loss scal")
def fresh_segmentation_in_fp16_without_a_scaler(fix):
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=bool(fix))

    def loss_of():
        images, masks = torch.randn(4, 1, 48, 48), torch.randint(0, 2, (4, 48, 48))
        return F.cross_entropy(model(images), masks) * 1e-3  # one of several terms

    train_in(FP16, loss_of, optimizer, scaler, steps=5)


@broken("domain", op="logdet|log", cure=r"slogdet|negative|det")
def fresh_an_invertible_convolution_with_a_negative_determinant(fix):
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


@broken("pole", op="log", cure=r"log of 0|logsumexp")
def fresh_a_mixture_density_network_and_an_outlier(fix):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 12))

    def loss_of(x, y):
        weights, means, log_sigmas = model(x).chunk(3, -1)
        weights, sigmas = weights.softmax(-1), log_sigmas.exp()
        squares = ((y - means) / sigmas).square()
        if fix:
            return -(weights.log() - 0.5 * squares - sigmas.log()).logsumexp(-1).mean()
        densities = torch.exp(-0.5 * squares) / (sigmas * math.sqrt(2 * math.pi))
        # all densities of an outlier underflow
        return -torch.log((weights * densities).sum(-1)).mean()  # <-

    x = torch.linspace(-1, 1, 32)[:, None]
    y = x.sin()
    y[20] = 60
    train(model, loss_of, [(x, y)] * 2, torch.optim.Adam(model.parameters(), lr=1e-3))


@broken("range", op="exp", cure="paste")
def fresh_a_vae_in_fp16_with_an_unbounded_logvar(fix):
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    model = nn.ModuleList([encoder, decoder])
    fix(model)
    with torch.no_grad():
        encoder[-1].bias[4:] = 11.5

    def loss_of():
        x = torch.rand(8, 64)
        mean, logvar = encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1).mean()  # <-
        return F.mse_loss(decoder(z).float(), x) + 1e-4 * kl.float()

    train_in(FP16, loss_of, torch.optim.Adam(model.parameters(), lr=1e-4), steps=3)


@broken("empty", op="mean|loss", cure=r"empty|no element|0 element|nothing")
def fresh_a_box_loss_of_a_batch_without_objects(fix):
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    batches = [
        (torch.randn(4, 3, 8, 8), torch.tensor(has)) for has in ([1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1])
    ]

    def loss_of(images, has_object):
        out = backbone(images)
        objectness = F.binary_cross_entropy_with_logits(out[:, 0], has_object.float())
        positive = has_object.bool()
        if fix and not positive.any():
            return objectness
        boxes = F.l1_loss(out[positive, 1:], torch.rand(int(positive.sum()), 4))  # <-
        return objectness + boxes

    train(backbone, loss_of, batches)


@broken("empty", op="nll_loss|cross_entropy", cure=r"ignore")
def fresh_a_language_model_batch_that_is_all_prompt(fix):
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    tokens = torch.randint(0, 20, (3, 2, 8))
    labels = tokens.clone()
    labels[0, :, :5] = -100
    labels[1] = -100

    def loss_of(x, y):
        logits = model(x)[:, :-1].reshape(-1, 20)
        if fix:
            y = y[:, 1:].reshape(-1)
            return F.cross_entropy(logits, y, reduction="sum") / (y != -100).sum().clamp(min=1)
        return F.cross_entropy(logits, y[:, 1:].reshape(-1))  # <-

    train(model, loss_of, zip(tokens, labels, strict=True))


def rotation(vector):
    """Rodrigues' formula, which is fine here: the angles are never 0."""
    angle = vector.norm(dim=-1, keepdim=True)[..., None]
    x, y, z = (vector / vector.norm(dim=-1, keepdim=True)).unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))
    return torch.eye(3) + angle.sin() * cross + (1 - angle.cos()) * cross @ cross


@broken("pole", op="acos", cure=r"acos|clamp|1")
def fresh_a_pose_that_is_already_right(fix):
    model = nn.Linear(6, 3)
    x = torch.randn(8, 6)
    with torch.no_grad():
        truth = rotation(model(x))

    def loss_of(x):
        turn = rotation(model(x)).transpose(-1, -2) @ truth
        cosine = (turn.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
        margin = 1e-6 if fix else 0
        cosine = cosine.clamp(-1 + margin, 1 - margin)
        return torch.acos(cosine).mean()  # <-

    train(model, loss_of, [(x,)] * 2)


@broken("pole", op="sqrt", cure=r"sqrt|eps|0")
def fresh_a_laplacian_at_the_origin(fix):
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))  # it sees the radius
    grid = torch.linspace(-1, 1, 5)
    points = torch.cartesian_prod(grid, grid)

    def loss_of(points):
        points = points.clone().requires_grad_()
        # its slope at the origin is infinite
        radius = torch.sqrt((points**2).sum(-1, keepdim=True) + (1e-4 if fix else 0))  # <-
        (slope,) = torch.autograd.grad(net(radius).sum(), points, create_graph=True)
        second = [torch.autograd.grad(slope[:, i].sum(), points, create_graph=True)[0][:, i] for i in (0, 1)]
        return (sum(second) - 1).square().mean()

    train(net, loss_of, [(points,)] * 2, torch.optim.Adam(net.parameters(), lr=1e-3))


@broken("pole", op="pow", cure=r"0|clamp|degree|pow")
def fresh_a_graph_convolution_and_a_node_without_edges(fix):
    first, second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)
    source, target = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])  # node 5 has no neighbors

    def convolved(linear, x):
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        scale = degree.clamp(min=1).pow(-0.5) if fix else degree.pow(-0.5)  # <-
        messages = linear(x * scale[:, None])[source]
        return torch.zeros(len(x), messages.shape[1]).index_add(0, target, messages) * scale[:, None]

    def loss_of(x, labels):
        return F.cross_entropy(convolved(second, convolved(first, x).relu()), labels)

    train(nn.ModuleList([first, second]), loss_of, [(torch.randn(6, 4), torch.arange(6) % 2)] * 2)


@broken("pole", op="div", cure=r"0|eps|normalize|divi")
def fresh_word_vectors_divided_by_the_norm_of_the_padding(fix):
    embedding = nn.Embedding(30, 8, padding_idx=0)
    encoder = nn.GRU(8, 8, batch_first=True)
    tokens = torch.randint(1, 30, (4, 6))
    tokens[1, 3:] = 0

    def loss_of(tokens):
        vectors = embedding(tokens)
        length = vectors.norm(dim=-1, keepdim=True)
        states, _ = encoder(vectors / (length.clamp(min=1e-12) if fix else length))  # <-
        return (states * (tokens != 0)[..., None]).square().mean()

    train(nn.ModuleList([embedding, encoder]), loss_of, [(tokens,)] * 2)


@broken("range", op="pow", cure="paste")
def fresh_an_rms_norm_of_a_large_residual_stream(fix):
    class RMSNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight  # <-

    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    blocks = [Residual(RMSNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(32, 10))
    fix(model)
    with torch.no_grad():
        model[0][3].bias[7] = 400  # one of the outlier channels that trained models have

    def loss_of():
        logits = model(torch.randn(4, 6, 32).half())
        return F.cross_entropy(logits.flatten(0, 1).float(), torch.arange(24) % 10)

    train_in(FP16, loss_of, torch.optim.AdamW(model.parameters(), lr=1e-4), steps=2)


@broken("no step", cure=r"item\(\)|torch\.tensor|new tensor")
def fresh_a_loss_that_was_wrapped_in_a_new_tensor(fix):
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


@broken("range", op="addcdiv|adam|div", cure=r"eps")
def fresh_adam_on_weights_in_half(fix):
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4 if fix else 1e-8)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(16, 6).half()).float(), torch.randint(0, 3, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <-


@broken("pole", op="log", cure=r"log of 0|xlogy|log_softmax|entr")
def fresh_an_entropy_bonus_over_forbidden_actions(fix):
    policy = nn.Linear(5, 4)
    allowed = torch.tensor([True, True, False, True])

    def loss_of(state):
        logits = policy(state).masked_fill(~allowed, -1e9)
        probabilities = logits.softmax(-1)
        chosen = probabilities[:, 0].log()
        if fix:
            entropy = torch.special.entr(probabilities[:, allowed]).sum(-1)
        else:
            entropy = -(probabilities * torch.log(probabilities)).sum(-1)  # <-
        return -(chosen + 0.01 * entropy).mean()

    train(policy, loss_of, [(torch.randn(6, 5),)] * 2)


@broken("pole", op="pow", cure=r"pow|0|eps")
def fresh_a_focal_loss_with_a_square_root(fix):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    x[2] *= 3000

    def loss_of(x, y):
        log_probability = F.log_softmax(model(x), dim=-1)
        y = torch.where(torch.arange(8) == 2, log_probability.argmax(-1), y)  # the large one is easy
        log_chosen = log_probability.gather(1, y[:, None]).squeeze(1)
        remaining = 1 - log_chosen.exp()
        remaining = remaining.clamp(min=1e-6) if fix else remaining
        return -(remaining**0.5 * log_chosen).mean()  # <-

    train(model, loss_of, [(x, y)] * 2)


@broken("domain", op="ctc", cure=r"zero_infinity|longer|shorter|length")
def fresh_speech_shorter_than_its_transcript(fix):
    model = nn.Sequential(nn.Conv1d(8, 16, 3, stride=2), nn.ReLU(), nn.Conv1d(16, 12, 3, stride=2))
    frames, lengths = torch.randn(2, 8, 40), torch.tensor([9, 3])
    transcripts = torch.randint(1, 12, (2, 6))

    def loss_of(frames):
        log_probabilities = model(frames).log_softmax(1).permute(2, 0, 1)
        spoken = torch.tensor([3, 6])
        return F.ctc_loss(log_probabilities, transcripts, lengths, spoken, zero_infinity=bool(fix))  # <-

    train(model, loss_of, [(frames,)] * 2)


@broken("pole", op="log", cure=r"where|log")
def fresh_a_where_that_chooses_after_the_log(fix):
    model = nn.Sequential(nn.Linear(3, 8), nn.Softplus())
    exposure = (torch.rand(10, 8) > 0.2).float()
    counts = torch.randint(0, 4, (10, 8)) * exposure

    def loss_of(x):
        rate = model(x) * exposure
        if fix:
            log_rate = torch.where(rate > 0, rate, torch.ones_like(rate)).log()
        else:
            log_rate = torch.where(rate > 0, torch.log(rate), torch.zeros_like(rate))  # <-
        return (rate - counts * log_rate).mean()

    train(model, loss_of, [(torch.randn(10, 3),)] * 2)


@broken("pole", op="eigh", cure=r"eigenvalue|equal|repeated|degenerate")
def fresh_whitening_by_eigenvectors_of_dead_features(fix):
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


@broken("no step", cure=r"optimizer|parameter")
def fresh_an_optimizer_of_a_model_that_was_replaced(fix):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # "start anew", after the optimizer was made
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if fix:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(
        model, lambda x: F.cross_entropy(model(x), torch.arange(8) % 2), [(torch.randn(8, 4),)] * 6, optimizer
    )


# For bad data, the finding names the first op that reads it. Here that is the Linear before the batch_norm.
@broken("data", op="addmm", cure=r"running|buffer|data|batch")
def fresh_running_statistics_that_a_skipped_batch_has_poisoned(fix):
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
        print("validation", F.cross_entropy(model(torch.randn(8, 4)), labels[:8]).item())


@broken("mask", op="softmax", cure=r"mask|-inf")
def fresh_multihead_attention_over_a_source_that_is_all_padding(fix):
    attention, head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 2)
    source, queries = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True

    def loss_of(labels):
        mask = padding.clone()
        if fix:
            mask[:, 0] = False
        mixed, _ = attention(queries, source, source, key_padding_mask=mask)  # <-
        return F.cross_entropy(head(mixed.mean(1)), labels)

    train(nn.ModuleList([attention, head]), loss_of, [(torch.arange(3) % 2,)] * 2)


@broken("domain", op="pow", cure=r"negative|clamp")
def fresh_generalised_mean_pooling_behind_gelu(fix):
    body, head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU()), nn.Linear(4, 3)
    p = nn.Parameter(torch.tensor(2.5))

    def loss_of(images, labels):
        x = body(images)
        x = x.clamp(min=1e-6) if fix else x
        # x is negative behind GELU
        pooled = x.pow(p).mean((-2, -1)).pow(1 / p)  # <-
        return F.cross_entropy(head(pooled), labels)

    model = nn.ParameterList([*body.parameters(), *head.parameters(), p])
    train(model, loss_of, [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)] * 2)


@broken("pole", op="log", cure=r"log of 0|clamp|eps")
def fresh_log_spectrograms_of_silence(fix):
    vocoder = nn.Sequential(nn.Conv1d(1, 4, 5, padding=2), nn.Tanh(), nn.Conv1d(4, 1, 5, padding=2))
    audio = torch.randn(4, 1, 256) * 0.1
    audio[2, :, 100:] = 0

    def log_magnitude(x):
        spectrum = torch.stft(x.squeeze(1), 64, window=torch.hann_window(64), return_complex=True).abs()
        return spectrum.clamp(min=1e-5 if fix else 0).log()  # <-

    train(vocoder, lambda x: F.l1_loss(log_magnitude(vocoder(x)), log_magnitude(x)), [(audio,)] * 2)


@broken("loss scale", cure=r"scale")
def fresh_a_static_loss_scale_that_skips_every_step(fix):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scale = 2.0**8 if fix else 2.0**22
    for _ in range(25):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        if all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            optimizer.step()
