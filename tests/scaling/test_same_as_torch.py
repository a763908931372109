"""Where torch.amp.GradScaler gives right results, ours gives the same, bit for bit."""

import copy
import inspect
import math
import pickle
import re
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch

from amp_plugin import GradScaler
from tests.process_groups import group_of_one


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


OPTIONS = {"init_scale": 2.0**24, "growth_interval": 3}
OURS = {**OPTIONS, "one_pass": False}
"""torch's own steps: one pass differs from them in last bits, see test_one_pass.py."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_losses_and_scales_are_equal(training, dtype, fused, clip):
    theirs = training(torch.amp.GradScaler("cpu", **OPTIONS), dtype, clip=clip, fused=fused)
    ours = training(GradScaler("cpu", **OURS), dtype, clip=clip, fused=fused)
    assert ours[0] == theirs[0]
    assert all(map(torch.equal, ours[1], theirs[1]))
    scales = [scale for _, scale in ours[0]]
    if dtype is torch.float16:
        assert any(b < a for a, b in pairwise(scales)), "no overflow: the test shows too little"


def test_every_public_method_of_torch_is_here():
    public = {name for name in dir(torch.amp.GradScaler) if not name.startswith("_")}
    assert public <= set(dir(GradScaler))
    for name in public:
        theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
        assert list(theirs) == list(inspect.signature(getattr(GradScaler, name)).parameters)[: len(theirs)], (
            name
        )
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)


def test_scale_keeps_containers():
    scaler, one = GradScaler("cpu", init_scale=4.0), torch.ones(())
    assert scaler.scale(one).item() == 4.0
    assert scaler.scale([one, (one,)]) == [4.0, (4.0,)]
    assert scaler.scale(Pair(one, one)) == Pair(4.0, 4.0)
    assert scaler.scale({"a": one}) == {"a": 4.0}
    assert [x.item() for x in scaler.scale(x for x in [one, one])] == [4.0, 4.0]
    for wrong, kind in (("loss", "str"), ([1], "int")):
        with pytest.raises(ValueError, match=f"iterable of Tensors, got {kind}; pass the loss"):
            scaler.scale(wrong)


def test_a_half_loss_is_scaled_in_float32():
    scaler = GradScaler("cpu")
    for loss in (torch.ones((), dtype=torch.float16), torch.full((2,), 8.0, dtype=torch.float16)):
        scaled = scaler.scale(loss)
        assert scaled.dtype is torch.float32
        assert scaled.isfinite().all()


def test_errors_that_protect_are_kept(weights):
    scaler, one = GradScaler("cpu"), weights()
    clips = (
        partial(scaler.clip_grad_norm_, max_norm=1.0),
        partial(scaler.clip_grad_value_, clip_value=1.0),
    )
    for call in (scaler.unscale_, scaler.step, scaler.core.ensure_unscaled, *clips):
        with pytest.raises(AssertionError, match="but _scale is None. Call scaler.scale"):
            call(one.optimizer)
    assert scaler.core.optimizers == []
    with pytest.raises(AssertionError, match="Attempted update but _scale is None"):
        scaler.update()
    one.backward(scaler)
    scaler.unscale_(one.optimizer)
    with pytest.raises(RuntimeError, match="unscale_\\(\\) has already been called .* unscale by themselves"):
        scaler.unscale_(one.optimizer)


def test_fp16_parameters_are_named():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler("cpu", init_scale=4.0)
    scaler.register(optimizer, names={"head.weight": param})
    scaler.scale((param * 2).sum()).backward()
    with pytest.raises(ValueError, match="FP16 gradients. Parameter 'head.weight' .* keep parameters in"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"growth_factor": 1.0}, "growth_factor=1.0 is not allowed; .* more than 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=.* is not allowed; .* more than 0 and less than 1"),
        ({"growth_interval": 0}, "growth_interval=0 is not allowed; give a whole number"),
        ({"min_scale": -1.0}, "min_scale=-1.0 is not allowed"),
        ({"init_scale": 4.0, "max_scale": 2.0}, "init_scale=4.0 is not between"),
        ({"on_min_scale": "stop"}, "'stop' is not allowed; give 'hold' or 'raise'"),
    ],
)
def test_bad_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        GradScaler("cpu", **options)


def test_getters_and_setters():
    for scaler in (GradScaler("cpu"), GradScaler("cpu", enabled=False)):
        scaler.set_growth_factor(3.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(5)
        scaler._init_scale = 4.0  # as programs also do
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (3.0, 0.25)
        assert (scaler.get_growth_interval(), scaler._init_scale) == (5, 4.0)
    with pytest.raises(ValueError, match="growth_factor=.* more than 1"):
        scaler.set_growth_factor(0.5)
    constant = GradScaler("cpu", dynamic=False)
    assert constant.get_growth_factor() == constant.get_backoff_factor() == 1.0
    with pytest.raises(TypeError, match="set_growth_interval\\(\\) needs a dynamic loss scale"):
        constant.set_growth_interval(3)


def test_disabled_passes_everything_through(weights):
    scaler, one = GradScaler("cpu", enabled=False), weights()
    loss = one.loss(2.0)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(one.optimizer)
    scaler.core.ensure_unscaled(one.optimizer)
    scaler.clip_grad_value_(one.params, 1.0)
    scaler.step(one.optimizer)
    scaler.end_iteration()
    assert (one.value, scaler.state_dict(), scaler.is_enabled()) == (-1.0, {}, False)
    assert (scaler.last_step(one.optimizer).found_inf.item(), scaler.skipped_steps()) == (0.0, 0)
    pickle.loads(pickle.dumps(copy.deepcopy(scaler)))


def test_private_names_other_code_touches(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0), weights()
    assert (scaler._scale, scaler._device) == (None, "cpu")
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler._scale.item() == 8.0
    assert scaler._growth_tracker.dtype is torch.int32
    stages = []
    for call in (
        lambda: one.backward(scaler),
        lambda: scaler.unscale_(one.optimizer),
        lambda: scaler.step(one.optimizer),
        scaler.update,
    ):
        call()
        stages.append(scaler._per_optimizer_states[id(one.optimizer)]["stage"].name)
    assert stages == ["READY", "UNSCALED", "STEPPED", "READY"]
    assert scaler._check_inf_per_device(one.optimizer) == {torch.device("cpu"): 0.0}
    assert scaler._found_inf_per_device(one.optimizer) == {torch.device("cpu"): 0.0}
    assert scaler._get_scale_async().item() == 8.0


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_an_overflow_that_a_program_writes_after_unscaling_counts(make):
    scaler, table = make("cpu"), torch.nn.Embedding(2, 1, sparse=True)
    dense = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([dense, table.weight], lr=1.0)
    scaler.scale(dense + table(torch.tensor([1, 1])).sum()).backward()
    scaler.unscale_(optimizer)
    scaler._found_inf_per_device(optimizer)[torch.device("cpu")].fill_(1.0)
    assert (scaler.step(optimizer), dense.item()) == (None, 1.0)


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_whether_a_step_was_skipped_is_read_until_the_update(make, factor):
    """Programs find this out from ``_found_inf_per_device`` of torch's scaler."""
    scaler, weight = make("cpu", init_scale=8.0), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        found = scaler._found_inf_per_device(optimizer)
        assert {place.type: flag.item() for place, flag in found.items()} == {"cpu": float(factor > 1)}
        scaler.update()
        assert scaler._found_inf_per_device(optimizer) == {}


def test_copies_and_pickles_between_iterations_only(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0, growth_interval=1), weights()
    scaler.register(one.optimizer)
    one.backward(scaler)
    with pytest.raises(RuntimeError, match="only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
    scaler.step(one.optimizer)
    with pytest.raises(RuntimeError, match="only be pickled at the beginning of an iteration"):
        copy.deepcopy(scaler)
    scaler.update()
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.get_scale() == 16.0
        assert twin.state_dict() == scaler.state_dict()
        other = weights()
        other.train(twin, 1.0)
        assert other.value == -1.0


def test_cuda_without_cuda_is_disabled_with_a_warning():
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    with pytest.warns(UserWarning, match="is disabled: CUDA is not available"):
        assert not GradScaler().is_enabled()


def test_new_scale_may_be_a_number_or_a_tensor(weights):
    scaler, one = GradScaler("cpu", init_scale=8.0), weights()
    scaler.scale(one.loss())
    for value in (2, 2.0, torch.tensor(2.0)):
        scaler.update(value)
        assert scaler.get_scale() == 2.0
    for wrong in (-1, "large", [1.0]):
        with pytest.raises(ValueError, match=re.escape(f"new_scale={wrong!r} is not allowed; give a finite")):
            scaler.update(wrong)
    with pytest.raises(ValueError, match="floating tensor of one element, got \\(2,\\) of torch.float32"):
        scaler.update(torch.ones(2))


@pytest.mark.parametrize("option", ["process_groups", "sharded_groups"])
def test_a_copy_keeps_its_groups_and_a_pickle_cannot(option):
    with group_of_one():
        group = torch.distributed.new_group([0])
        scaler = GradScaler("cpu", **{option: [group]})
        twin = copy.deepcopy(scaler)
        for one in (scaler, twin):
            with pytest.raises(RuntimeError, match=r"cannot be pickled.* save its state_dict"):
                pickle.dumps(one)
