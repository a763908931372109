"""What ``.grad`` holds after ``scaler.step()``: what torch.amp leaves there, unscaled, clipped if it was clipped."""

import itertools

import pytest
import torch

from amp_plugin import GradScaler

SCALE = 2.0**10
MAX_NORM = 0.1
KINDS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),  # no op of ours steps it
    "maximize": (torch.optim.SGD, {"maximize": True, "weight_decay": 0.1}),
}
FLAGS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
UNSUPPORTED = {("adagrad", "fused")}  # torch's fused Adagrad has no support for loss scales
CLIPS = ("none", "by torch", "by ours", "folded")


def pairs_of(kinds):
    return [pair for pair in itertools.product(kinds, FLAGS) if pair not in UNSUPPORTED]


class Training:
    """Two parameters and an optimizer; the gradients of a step are random, 0.1 times normal."""

    def __init__(self, scaler, kind, flags, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(3, 5), (7,)]
        ]
        cls, options = KINDS[kind]
        self.optimizer = cls(self.params, lr=0.1, **options, **FLAGS[flags])
        self.scaler = scaler

    def backward(self, seed, *, bad=None):
        generator = torch.Generator().manual_seed(seed)
        wanted = [torch.randn(param.shape, generator=generator) * 0.1 for param in self.params]
        if bad is not None:
            wanted[1][2] = bad
        loss = sum((p * w.to(p.dtype)).sum() for p, w in zip(self.params, wanted, strict=True))
        self.scaler.scale(loss).backward()

    def step(self, clip):
        if clip == "by torch":
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        elif clip != "none":
            self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM, fold=clip == "folded")
        self.scaler.step(self.optimizer)

    def gradients(self):
        return [param.grad.clone() for param in self.params]


def of_torch():
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def of_ours(**options):
    return GradScaler("cpu", init_scale=SCALE, **options)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("kind", "flags"), pairs_of(KINDS))
def test_a_taken_step_leaves_the_gradients_of_torch_amp(kind, flags, clip):
    ours, theirs = (Training(scaler, kind, flags) for scaler in (of_ours(), of_torch()))
    for seed in range(3):
        for run in (ours, theirs):
            run.optimizer.zero_grad()
            run.backward(seed)
            run.step(clip if run is ours or clip == "none" else "by torch")
        assert not ours.scaler.last_step(ours.optimizer).skipped
        for mine, right in zip(ours.gradients(), theirs.gradients(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-6, atol=0)
        for run in (ours, theirs):
            run.scaler.update()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("clip", ["none", "by ours", "folded"])
@pytest.mark.parametrize(("kind", "flags"), pairs_of(["sgd", "adamw", "adagrad"]))
def test_a_skipped_step_leaves_unscaled_gradients(kind, flags, clip, bad):
    """As torch.amp's after unscale_(), fused optimizers too, whose gradients torch leaves scaled without it."""
    ours, theirs = (Training(scaler, kind, flags) for scaler in (of_ours(), of_torch()))
    for run in (ours, theirs):
        run.backward(0)
        run.step("none")  # so that state exists
        run.scaler.update()
        run.optimizer.zero_grad()
        run.backward(1, bad=bad)
    theirs.scaler.unscale_(theirs.optimizer)
    for run in (ours, theirs):
        run.step(clip if run is ours else "none")
    assert ours.scaler.last_step(ours.optimizer).skipped
    for mine, right in zip(ours.gradients(), theirs.gradients(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("bad", [None, torch.inf])
def test_where_nothing_is_scaled_a_clip_is_written_too(kind, fold, bad):
    run = Training(GradScaler("cpu", enabled=False), kind, "plain")
    run.backward(0, bad=bad)
    before = run.gradients()
    run.step("folded" if fold else "by ours")
    assert run.scaler.last_step(run.optimizer).skipped is (bad is not None)
    norm = torch.nn.utils.get_total_norm(before)
    factor = 1.0 if bad is not None else MAX_NORM / (norm + 1e-6)
    assert factor == 1.0 or factor < 0.9
    for mine, right in zip(run.gradients(), before, strict=True):
        torch.testing.assert_close(mine, right * factor, rtol=1e-6, atol=0)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_rounded_once(dtype):
    param = torch.nn.Parameter(torch.ones(3, 5))
    param.grad_dtype = dtype
    optimizer, scaler = (
        torch.optim.SGD([param], lr=0.1),
        GradScaler("cpu", init_scale=1000.0, fp16_gradients=True),
    )
    scaler.scale((param * torch.randn(3, 5) * 0.01).sum()).backward()
    scaled = param.grad.clone()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).one_pass
    assert param.grad.dtype is dtype
    assert torch.equal(param.grad, (scaled.float() / 1000.0).to(dtype))


HIDDEN = {
    "data": lambda param, value: param.grad.data.copy_(value),
    "numpy": lambda param, value: param.grad.numpy().__setitem__(..., value.numpy()),
    "no write": lambda param, value: None,
    "visible": lambda param, value: param.grad.copy_(value),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("write", HIDDEN)
@pytest.mark.parametrize(("kind", "flags"), pairs_of(["sgd", "adamw", "adagrad"]))
def test_gradients_used_again_after_an_update_are_scaled_ones(kind, flags, write, clip):
    """A replayed graph, ``.data``, NumPy and collectives write gradients without a version bump."""
    ours, theirs = (Training(scaler, kind, flags) for scaler in (of_ours(), of_torch()))
    for run in (ours, theirs):
        run.backward(0)
        run.scaler.unscale_(run.optimizer)  # so that both go on from the same gradients
        run.scaler.step(run.optimizer)
        run.scaler.update()
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(param.shape, generator=generator) * SCALE for param in ours.params]
    for _ in range(2):
        for run in (ours, theirs):
            for param, value in zip(run.params, values, strict=True):
                HIDDEN[write](param, value)
            run.step(clip if run is ours or clip == "none" else "by torch")
        for mine, right in zip(ours.params, theirs.params, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-5, atol=0)
        for run in (ours, theirs):
            run.scaler.update()


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("again", [0, 1])
def test_so_are_gradients_of_a_parameter_that_two_optimizers_step(again, flags):
    param = torch.nn.Parameter(torch.zeros(3))
    pair = [torch.optim.SGD([param], lr=1.0, **FLAGS[flags]) for _ in range(2)]
    scaler = of_ours()
    scaler.register(*pair)
    scaler.scale(param.sum()).backward()
    for optimizer in pair:
        scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-2.0] * 3
    param.grad.data.fill_(4 * SCALE)
    scaler.step(pair[again])
    assert param.grad.tolist() == [4.0] * 3
    assert param.tolist() == [-6.0] * 3


def test_gradients_unscaled_once_more_after_the_step_are_scaled_ones_after_the_update():
    run = Training(of_ours(), "sgd", "plain")
    run.backward(0)
    run.scaler.step(run.optimizer)
    run.scaler.ensure_unscaled(run.optimizer)
    run.scaler.update()
    for param in run.params:
        param.grad.data.fill_(4 * SCALE)
    run.scaler.ensure_unscaled(run.optimizer)
    assert [param.grad.unique().tolist() for param in run.params] == [[4.0], [4.0]]


def test_a_hook_after_the_step_sees_unscaled_gradients():
    run = Training(of_ours(), "adamw", "fused")
    seen = []
    run.optimizer.register_step_post_hook(lambda *_: seen.append(run.gradients()))
    run.backward(0)
    run.scaler.unscale_(run.optimizer)
    expected = run.gradients()
    run.optimizer.zero_grad()
    run.scaler.update()
    run.backward(0)
    run.step("none")
    for mine, right in zip(seen[0], expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=0)
