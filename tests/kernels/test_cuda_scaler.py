"""The scaler on the CUDA kernels, compared with the scaler on the CPU."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from amp_plugin import GradScaler, store_weights
from tests.host_device import host_device
from tests.scaling.ops_seen import OpsSeen

pytestmark = pytest.mark.gpu
OVERFLOWS = (3, 4, 9)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


KERNELS = {
    (sgd, None): {"norm_check", "step"},
    (sgd, "in place"): {"unscale", "multiply", "norm_check", "step"},
    # The first step is torch's own. Its gradients are unscaled and clipped in place.
    (fused_adamw, None): {"unscale", "norm_check", "step"},
    (fused_adamw, "in place"): {"unscale", "multiply", "norm_check", "step"},
    (fused_adamw, "in the step"): {"unscale", "multiply", "norm_check", "clip_factor", "step"},
}


def train(optimizer, clip, device):
    """Train on batches, some of which overflow. Return the result of each step, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to(device)
    stepper = optimizer(model.parameters())
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=3)
    scaler.register(stepper, names=model)
    steps = []
    for i in range(12):
        x = torch.randn(32, 8)
        x[0, 0] = float("nan") if i in OVERFLOWS else x[0, 0]
        for half in x.to(device).chunk(2):
            scaler.scale(model(half).square().mean()).backward()
        if clip == "in the step":
            norm = scaler.clip_and_step(stepper, 0.5).norm
        else:
            norm = scaler.clip_grad_norm_(stepper, 0.5) if clip else torch.zeros(())
            scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        last = scaler.last_step(stepper)
        steps.append((last.skipped, str(last.overflow_report()), scaler.get_scale(), norm.item()))
    return steps, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(("optimizer", "clip"), KERNELS, ids=lambda given: getattr(given, "__name__", given))
def test_training_is_that_of_the_cpu(optimizer, clip):
    if host_device.LOADED:
        torch.ops.host_device.launched()
    ours, weights = train(optimizer, clip, "cuda")
    if host_device.LOADED:
        launched = set(torch.ops.host_device.launched())
        assert launched == {"update_scale", *KERNELS[optimizer, clip]}
    theirs, expected = train(optimizer, clip, "cpu")
    assert [skipped for skipped, *_ in ours] == [i in OVERFLOWS for i in range(12)]
    for one, other in zip(ours, theirs, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], rel=1e-5, nan_ok=True)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def is_of_a_kernel(name):
    """Return whether an op may launch a kernel. The host device's own ops only switch devices."""
    return hasattr(torch.ops.aten, name) or hasattr(torch.ops.amp_plugin, name)


@pytest.mark.skipif(not host_device.LOADED, reason="counts what the device made of host memory is asked for")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_launches_of_a_step_with_a_clip_after_an_update(captured):
    model = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    scaler = GradScaler("cuda", init_scale=8.0, growth_interval=1)
    x, seen = torch.ones(2, 4, device="cuda"), OpsSeen()

    def iteration():
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        seen.names.clear()
        with seen:
            scaler.clip_and_step(optimizer, 0.5)
        scaler.update()

    for _ in range(3):
        iteration()
    if captured:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            iteration()
    before = seen.names[: seen.names.index("step_")]
    before = list(filter(is_of_a_kernel, before))
    assert before == ["norm_check", "clip_factor"]


NO_LAUNCH = {"empty", "empty_like", "detach", "alias", "view", "select", "lift_fresh"}
LAUNCHES = {
    ("fp16", None): (["norm_check", "step", "update_scale"], 5),
    ("fp16", "in place"): (["unscale", "multiply", "norm_check", "step", "update_scale"], 8),
    ("fp16", "in the step"): (["norm_check", "clip_factor", "step", "update_scale"], 6),
    ("bf16", None): (["norm_check", "step"], 3),
    ("bf16", "in place"): (["norm_check", "multiply", "norm_check", "step"], 5),
    ("bf16", "in the step"): (["norm_check", "clip_factor", "step"], 4),
}
"""Our kernels in order, and the most ops that reach the device: ours, torch's, and the copy of the flag to the host."""


class DeviceOpsSeen(OpsSeen):
    """Records the ops that read or write a tensor on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen = len(self.names)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if not any(tensor.is_cuda for tensor in tensors):
            del self.names[seen:]
        return out


@pytest.mark.skipif(not host_device.LOADED, reason="counts what the device made of host memory is asked for")
@pytest.mark.parametrize("clip", [None, "in place", "in the step"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "bare"])
def test_the_launches_of_a_whole_step(precision, state, clip):
    """Compressed states are stepped directly: nothing decompresses them, and no torch kernel takes the step."""
    if precision == "bare" and clip is not None:
        pytest.skip("clips belong to a scaler")
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if state != "fp32":
        store_weights(model, optimizer, weights="fp32", state=state)
    scaler = GradScaler("cuda", init_scale=8.0, growth_interval=1, enabled=precision == "fp16")
    scaler.register(optimizer)
    x, seen = torch.ones(2, 64, device="cuda"), DeviceOpsSeen()
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        seen.names.clear()
        torch.ops.host_device.launched()
        with seen:
            if clip == "in place":
                scaler.clip_grad_norm_(optimizer, 0.5)
            if precision == "bare":
                optimizer.step()
            elif clip == "in the step":
                scaler.clip_and_step(optimizer, 0.5)
            else:
                scaler.step(optimizer)
            scaler.update()
    ops = [name for name in seen.names if is_of_a_kernel(name) and name not in NO_LAUNCH]
    launched = list(torch.ops.host_device.launched())
    if precision == "bare":
        # Without a scaler, only compressed states need our step, because torch's own step would decompress
        # all of them.
        assert launched == (["step"] if state != "fp32" else [])
        assert ops == (["step_"] if state != "fp32" else ["_foreach_add_", "_fused_adamw_"])
        return
    kernels, most = LAUNCHES[precision, clip]
    assert launched == kernels
    assert len(ops) <= most, ops
