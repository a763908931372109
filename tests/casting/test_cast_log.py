"""log_casts records every cast, where it happens, and how many bytes it moves."""

import io
import threading

import pytest
import rich.console
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_plugin import OpRules, autocast, autocast_module, log_casts, set_default_rules
from amp_plugin.casting.cast_log import CastTotals
from amp_plugin.casting.threads import checkpoint_contexts
from amp_plugin.kernels.build import native_core

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.native


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.back = nn.Linear(8, 4, bias=False)

    def forward(self, x, *, offset):
        return self.back(torch.relu(self.linear(x + offset)).float())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(4, 2)
        self.head.requires_grad_(False)
        self.register_buffer("mix", torch.eye(2))

    def forward(self, x):
        x = x @ torch.eye(4)
        return self.head(self.block(x, offset=1.0)) @ self.mix


def brief(log):
    return [
        (c.module, c.op.removeprefix("aten::"), c.argument, c.kind, c.parameter, c.cached)
        for c in log.records()
    ]


EXPECTED = [
    ("Net", "matmul.default", "self", "input", "", False),
    ("Net", "matmul.default", "other", "activation", "", False),
    ("Net.block.linear", "linear.default", "weight", "weight", "block.linear.weight", False),
    ("Net.block.linear", "linear.default", "bias", "weight", "block.linear.bias", False),
    ("Net.block.back", "linear.default", "input", "activation", "", False),
    ("Net.block.back", "linear.default", "weight", "weight", "block.back.weight", False),
    ("Net.head", "linear.default", "weight", "weight", "head.weight", False),
    ("Net.head", "linear.default", "bias", "weight", "head.bias", False),
    ("Net", "matmul.default", "other", "weight", "mix", False),
]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_each_cast_of_a_model_with_its_place(named, grad):
    net, x = Net(), torch.ones(3, 4)
    with log_casts(net if named else None) as log, autocast("cpu", dtype=BF16), torch.set_grad_enabled(grad):
        net(x)
    assert brief(log) == EXPECTED
    first, weight = log.records()[0], log.records()[2]
    assert (first.before, first.after, first.elements, first.bytes) == (FP32, BF16, 12, 12 * (4 + 2))
    assert (weight.elements, weight.bytes, weight.device) == (32, 32 * 6, "cpu")
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


class Counts(nn.Linear):
    """A module whose hash changes while it runs, as a metric's does."""

    calls = 0

    def __hash__(self):
        return self.calls

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_module_whose_hash_changes_keeps_its_path():
    net = nn.Sequential(Counts(4, 4, bias=False))
    with log_casts() as log, autocast("cpu", dtype=BF16):
        net(torch.ones(3, 4))
        net(torch.ones(3, 4))
    assert {cast.module for cast in log.records()} == {"Sequential.0"}


def test_all_dtypes_match_what_ops_were_given():
    """Each logged cast is one ``_to_copy`` that torch's dispatcher sees, and there are no others."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                Copies.seen += args[0].numel()
            return func(*args, **(kwargs or {}))

    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.LSTM(6, 8, batch_first=True))
    with Copies(), log_casts(net) as log, autocast("cpu", dtype=BF16):
        nn.functional.mse_loss(net(torch.ones(3, 2, 8))[0], torch.ones(3, 4, 8, dtype=BF16))
    assert log.totals().elements == Copies.seen > 0


def test_cached_casts_move_nothing():
    linear = nn.Linear(4, 4)
    with log_casts(linear) as log, autocast("cpu", dtype=BF16):
        linear(linear(torch.ones(1, 4)))
    assert [(cast.cached, cast.bytes > 0) for cast in log.records()] == [(False, True)] * 3 + [
        (True, False)
    ] * 2
    assert log.totals() == CastTotals(casts=3, cached=2, elements=24, bytes=24 * 6)
    assert log.by_op() == {"aten::linear.default": log.totals()}
    assert log.by_module() == {"Linear": log.totals()}
    assert len(log) == 5


def test_promotion_fp32_rules_and_lists():
    weight = torch.ones(2, requires_grad=True)
    with log_casts() as log, autocast("cpu", dtype=BF16):
        torch.stack([torch.ones(2, dtype=BF16), weight])
        torch.nn.functional.mse_loss(torch.ones(2, dtype=BF16), torch.ones(2))
    rows = [(cast.op, cast.argument, cast.before, cast.after, cast.kind) for cast in log.records()]
    assert rows == [
        ("aten::stack.default", "tensors", BF16, FP32, "activation"),
        ("aten::mse_loss.default", "self", BF16, FP32, "activation"),
    ]
    assert {cast.module for cast in log.records()} == {""}


def test_own_rules_and_default_rules_are_followed():
    rules = OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
    x = torch.ones(2, dtype=BF16)
    with log_casts() as log, autocast("cpu", dtype=BF16, rules=rules):
        x.softmax(-1)
        assert len(log) == 1  # seen while it is open
    assert [cast.op for cast in log.records()] == ["aten::softmax.int"]
    for followed, casts in ((None, 0), (OpRules.default("cpu"), 2)):
        set_default_rules(followed)
        with log_casts() as log, torch.autocast("cpu", dtype=BF16):
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert len(log) == casts


def test_threads_and_recomputation_know_their_module():
    net, x = Net(), torch.ones(3, 4, requires_grad=True)

    def run():
        with autocast("cpu", dtype=BF16):
            net(x)

    with log_casts(autocast_module(net)) as log:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert brief(log) == EXPECTED
    with log_casts(net) as log:
        with autocast("cpu", dtype=BF16):
            output = checkpoint(net, x, use_reentrant=False, context_fn=checkpoint_contexts)
        assert brief(log) == EXPECTED
        output.sum().backward()
    assert brief(log) == EXPECTED * 2


def test_an_error_in_a_module_leaves_the_others_in_place():
    class Broken(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.broken, self.linear = nn.Sequential(Broken()), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            with pytest.raises(ZeroDivisionError):
                self.broken(x)
            return self.linear(x)

    for given in (True, False):
        net = Tries()
        with log_casts(net if given else None) as log, autocast("cpu", dtype=BF16):
            net(torch.ones(1, 4))
            torch.ones(2, 2) @ torch.ones(2, 2)
        places = [("Tries.linear", "input"), ("Tries.linear", "weight"), *[("", "activation")] * 2]
        assert [(cast.module, cast.kind) for cast in log.records()] == places


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_logs_nothing_and_its_trace_neither():
    linear = torch.compile(nn.Linear(4, 4), backend="aot_eager")
    with log_casts(linear) as log, autocast("cpu", dtype=BF16):
        assert linear(torch.ones(1, 4)).dtype is BF16
    assert len(log) == 0


def test_nothing_is_recorded_when_off_and_one_log_at_a_time():
    with pytest.raises(ZeroDivisionError), log_casts():
        raise ZeroDivisionError
    with (
        log_casts() as log,  # the log above was closed
        pytest.raises(RuntimeError, match="another log is open in this process"),
        log_casts(),
    ):
        pass
    with autocast("cpu", dtype=BF16):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(log) == 0
    assert repr(log) == "CastLog(0 casts, 0 cached, 0 bytes moved)"
    assert native_core().extension.take_cast_log() == []


def test_a_log_that_is_opened_again_goes_on():
    log, net = log_casts(), Net()
    for times in (1, 2):
        with log, autocast("cpu", dtype=BF16):
            net(torch.ones(3, 4))
        assert brief(log) == EXPECTED * times
    with log_casts():
        pass


def shown(table, width=200):
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_tables():
    with log_casts(net := Net()) as log, autocast("cpu", BF16):
        net(torch.ones(3, 4))
    text = shown(log.table())
    for part in ("Net.block.linear", "bias (weight)", "fp32 → bf16", "192 bytes", "total"):
        assert part in text
    assert shown(log.table("module")).count("Net") == 4
    assert "matmul" in shown(log.table("op"))
    assert "…" not in shown(log.table(), width=70)  # long names are wrapped, not cut off
    with pytest.raises(ValueError, match=r"table\(by='kind'\): allowed are cast, module, op"):
        log.table("kind")


def test_a_data_frame_has_a_row_per_cast():
    with log_casts(net := nn.Linear(2, 2)) as log:
        assert list(log.to_pandas().columns)[:3] == ["module", "op", "argument"]
        with autocast("cpu", BF16):
            net(torch.ones(1, 2))
    frame = log.to_pandas()
    assert list(frame["before"]) == ["fp32"] * 3
    assert list(frame["after"]) == ["bf16"] * 3
    assert frame["bytes"].sum() == log.totals().bytes
