"""Reports about a sharded model."""

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import MeanMetric

from amp_plugin import DtypePlan, dtype_report, fully_shard, store_weights
from amp_plugin.sharding.fully_shard import has_dtypes_by_parameter
from amp_plugin.sharding.report import _NAMESPACES, _op_of
from amp_plugin.weights.store import weight_bytes
from tests.process_groups import group_of_one
from tests.sharding.models import Net

PLAN = DtypePlan(compute="bf16", fp32_modules=["LayerNorm"])
BF16, FP32 = torch.bfloat16, torch.float32


def shown(report):
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(report)
    return " ".join(console.export_text().replace("│", " ").split())


class TestDtypeReport:
    def test_a_model_that_is_whole_is_one_unit(self):
        report = dtype_report(Net())
        (unit,) = report.units
        assert (unit.engine, unit.parameters, unit.local_bytes, unit.reduced) == ("none", 287, 4 * 287, None)
        assert report.rows() == []  # nothing has run yet

    def test_with_inputs_the_calls_of_modules_are_there_too(self):
        net = Net().train()
        with torch.autocast("cpu", dtype=BF16):
            report = dtype_report(net, torch.ones(2, 5))
        rows = [(row.module, row.kind, row.inputs, row.outputs, row.weights) for row in report.rows()]
        assert rows[:4] == [
            ("", "Net", (FP32,), (BF16,), ()),
            ("inp", "Linear", (FP32,), (BF16,), (FP32,)),
            ("blocks.0", "Block", (BF16,), (BF16,), ()),
            ("blocks.0.norm", "LayerNorm", (BF16,), (BF16,), (FP32,)),
        ]
        assert len(rows) == 11
        assert "inp Linear fp32 bf16 fp32" in shown(report.table())
        assert net.training
        with pytest.raises(RuntimeError):
            dtype_report(net, torch.ones(3, 4))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())

    def test_a_metric_whose_hash_changes_as_it_counts_is_a_module_like_others(self):
        report = dtype_report(MeanMetric(), 1.0)
        assert [row.kind for row in report.rows()] == ["MeanMetric"]

    def test_it_is_shown_as_tables(self):
        with group_of_one():
            net = fully_shard(Net(), PLAN, mesh=init_device_mesh("cpu", (1,)))
            text = shown(dtype_report(net))
        unit = "uint8" if has_dtypes_by_parameter() else "blocks.0.norm"
        for word in (unit, "(model)", "fp32" if unit == "uint8" else "bf16"):
            assert word in text


def lines_at_80(report):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text().splitlines()


class Layers(nn.Module):
    """Three layers whose last weight has a long name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.the_output_projection_of_the_decoder = nn.Linear(4, 4)


class TestTablesOnANarrowScreen:
    def test_units_come_in_the_order_of_the_model_and_outer_ones_after_inner_ones(self):
        with group_of_one():
            net = Layers()
            units = [net.the_output_projection_of_the_decoder, *net.blocks]
            fully_shard(net, PLAN, units=units, mesh=init_device_mesh("cpu", (1,)))
            names = [unit.name for unit in dtype_report(net).units]
        inner = [] if has_dtypes_by_parameter() else ["1"]
        blocks = [f"blocks.{i}{end}" for i in range(3) for end in (*(f".{name}" for name in inner), "")]
        # The model has no weights of its own, so it is not a unit with weights.
        assert names == [*blocks, "the_output_projection_of_the_decoder"]

    def test_a_name_stays_on_one_line_and_loses_its_middle(self):
        with group_of_one():
            net = Layers()
            units = [net.the_output_projection_of_the_decoder, *net.blocks]
            fully_shard(net, PLAN, units=units, mesh=init_device_mesh("cpu", (1,)))
            lines = lines_at_80(dtype_report(net))
        rows = [line.split()[0] for line in lines if "fp32" in line]
        assert rows[:-1] == [unit.name for unit in dtype_report(net).units][:-1]
        head, tail = rows[-1].split("…")
        assert "the_output_projection_of_the_decoder".startswith(head)
        assert "the_output_projection_of_the_decoder".endswith(tail)
        assert min(len(head), len(tail)) >= 6

    def test_the_names_of_calls_stay_on_one_line_too(self):
        net = nn.Sequential()
        net.add_module("a_name_that_is_much_too_long_for_the_first_column_" * 2 + "end", nn.Linear(2, 2))
        lines = lines_at_80(dtype_report(net, torch.ones(1, 2)).table())
        (row,) = [line for line in lines if "Linear" in line]
        assert "…" in row
        assert "end " in row
        assert len([line for line in lines if "│" in line]) == 2

    @pytest.mark.parametrize("weights", ["bf16", "fp32"])
    def test_the_bytes_of_stored_weights_include_remainders_and_say_so(self, weights):
        net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        store_weights(net, weights=weights)
        report = dtype_report(net)
        (unit,) = report.units
        counted = weight_bytes(net)
        assert unit.local_bytes == counted.weights + counted.masters == 4 * unit.parameters
        assert unit.remainder_bytes == counted.masters == (2 * 20 if weights == "bf16" else 0)
        assert ("include their remainders" in shown(report)) is (weights == "bf16")


def test_bytes_of_weights_are_those_of_this_rank():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Linear(8, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        assert isinstance(model.weight, DTensor)
        assert weight_bytes(model).weights == 4 * 64 // 4
    finally:
        torch.distributed.destroy_process_group()


def test_every_collective_of_torch_that_carries_tensors_has_a_name():
    packets = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.partition("::")[0] in _NAMESPACES
    }
    named = {packet: _op_of(SimpleNamespace(_opname=packet.partition("::")[2])) for packet in packets}
    assert (
        named["c10d::_allgather_base_"] == named["_c10d_functional::all_gather_into_tensor"] == "all_gather"
    )
    assert named["c10d::_reduce_scatter_base_"] == "reduce_scatter"
    unnamed = {packet.partition("::")[2].strip("_") for packet, op in named.items() if op is None}
    others = {"barrier", "monitored_barrier", "wait_tensor", "wait_tensors", "check_for_nan", "batch_p2p_ops"}
    assert unnamed <= others | {"wrap_tensor_autograd"}
