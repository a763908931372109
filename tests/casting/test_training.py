"""Training under our autocast equals training under torch.amp, bit for bit."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import amp_plugin
from amp_plugin.kernels.build import native_core

DTYPES = [torch.bfloat16, torch.float16]


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 10),
    )  # fmt: skip


def losses(autocast, scaler_class, dtype, *, steps=50, whole_loop=False):
    """Return the losses and final weights of a training run.

    ``whole_loop`` puts the whole run into one region.
    """
    data = load_digits()
    images, labels = torch.tensor(data.images).float().unsqueeze(1) / 16, torch.tensor(data.target)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = scaler_class("cpu", init_scale=2.0**14, growth_interval=10, enabled=dtype is torch.float16)
    generator = torch.Generator().manual_seed(1)
    seen = []
    # only our region can surround a loop: torch's, even if disabled, would use stale casts of weights
    with autocast("cpu", dtype=dtype) if whole_loop else nullcontext():
        for _ in range(steps):
            batch = torch.randint(len(images), (64,), generator=generator)
            optimizer.zero_grad()
            with autocast("cpu", dtype=dtype):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.detach().float())
    return torch.stack(seen), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_training_equals_torch_amp(dtype):
    theirs = losses(torch.autocast, torch.amp.GradScaler, dtype)
    scaler = partial(amp_plugin.GradScaler, one_pass=False)  # torch's own optimizer step
    ours = losses(amp_plugin.autocast, scaler, dtype)
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert ours[0][-10:].mean() < ours[0][:10].mean() / 2  # and the model has learned


@pytest.mark.native
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_region_around_the_whole_loop_changes_no_bit(dtype):
    forward_only = losses(amp_plugin.autocast, amp_plugin.GradScaler, dtype, steps=15)
    whole = losses(amp_plugin.autocast, amp_plugin.GradScaler, dtype, steps=15, whole_loop=True)
    assert torch.equal(whole[0], forward_only[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[1], forward_only[1], strict=True))


@pytest.mark.filterwarnings("ignore")  # deprecation warnings of transformers
def test_a_transformers_model_gives_the_same_bits():
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=1, **sizes)
    model = transformers.LlamaForCausalLM(config).train()

    def run(autocast):
        model.zero_grad()
        with autocast("cpu", dtype=torch.bfloat16):
            output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        return [output.loss.detach(), output.logits.detach(), *(p.grad for p in model.parameters())]

    for ours, theirs in zip(run(amp_plugin.autocast), run(torch.autocast), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.native
class TestWholeLoop:
    """A region around forward, backward and step does not apply to the backward pass."""

    def check(self, forward):
        seen, gradients = [], []
        for whole in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            model[0].weight.register_hook(lambda g: seen.append((g @ g.t()).dtype))
            with amp_plugin.autocast("cpu", enabled=whole):
                with amp_plugin.autocast("cpu"):
                    loss = forward(model, torch.randn(4, 8))
                loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        assert seen == [torch.float32, torch.float32]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    @pytest.mark.parametrize("use_reentrant", [None, False, True])
    def test_checkpoint(self, use_reentrant):
        def forward(model, x):
            if use_reentrant is not None:
                model = partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=use_reentrant)
            return model(x.requires_grad_()).float().square().sum()

        self.check(forward)

    def test_custom_function_without_custom_bwd(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                product = x.float() @ torch.eye(x.shape[1])
                assert product.dtype is torch.float32
                return 2 * product.to(x.dtype) * grad

        self.check(lambda model, x: Square.apply(model(x)).float().sum())

    def test_a_region_opened_in_the_backward_pass_counts(self):
        w = torch.randn(3, 3, requires_grad=True)
        seen = []

        def hook(grad):
            grad = grad.float()
            with amp_plugin.autocast("cpu", dtype=torch.float16):
                seen.append((grad @ grad).dtype)
            seen.append((grad @ grad).dtype)

        with amp_plugin.autocast("cpu"):
            y = w @ w
            y.register_hook(hook)
            y.float().sum().backward()
            assert (w @ w).dtype is torch.bfloat16
        assert seen == [torch.float16, torch.float32]

    def test_no_memory_grows_from_iteration_to_iteration(self):
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with amp_plugin.autocast("cpu"):
            for _ in range(5):
                model(x).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert native_core().extension.kept_cast_count() <= 2
