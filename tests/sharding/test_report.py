"""What is reported of a sharded model, here and on the command line."""

import io
import json

import pytest
import torch
from amp_plugin.weights.weight_bytes import weight_bytes
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

from amp_plugin import DtypePlan, dtype_report, fully_shard
from amp_plugin.cli import app
from amp_plugin.model_examination import examine_model, function_named
from amp_plugin.sharding.unit_policies import has_dtypes_by_parameter
from tests.process_groups import group_of_one
from tests.sharding.models import Net

TARGET = "tests.sharding.models:Net"
PLAN = DtypePlan(compute="bf16", fp32_modules=["LayerNorm"])


class TestDtypeReport:
    def test_a_model_that_is_whole_is_one_unit(self):
        report = dtype_report(Net())
        (unit,) = report.units
        assert (unit.engine, unit.parameters, unit.local_bytes, unit.reduced) == ("none", 287, 4 * 287, None)
        assert report.bytes().per_parameter() == {
            "weights": 4.0,
            "gradients": 4.0,
            "moments": 8.0,
            "largest_gather": 0.0,
        }
        assert report.rows() == []  # nothing was run
        assert report.collectives() == []

    def test_with_inputs_the_calls_of_modules_are_there_too(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            report = dtype_report(Net(), torch.ones(2, 5))
        assert {row.kind for row in report.rows()} == {"Net", "Block", "LayerNorm", "Linear"}
        assert repr(report) == "ModelDtypes(1 units, 11 module calls)"

    def test_a_model_that_takes_nothing_runs(self):
        class Constant(nn.Linear):
            def forward(self):
                return self.weight * 2

        assert [row.kind for row in dtype_report(Constant(1, 1)).rows()] == ["Constant"]

    def test_it_is_shown_as_tables(self):
        with group_of_one():
            net = fully_shard(Net(), PLAN, mesh=init_device_mesh("cpu", (1,)))
            console = Console(width=130, record=True, file=io.StringIO())
            console.print(dtype_report(net))
        text = " ".join(console.export_text().split())
        unit = "uint8" if has_dtypes_by_parameter() else "blocks.0.norm"
        for word in (unit, "(model)", "fp32" if unit == "uint8" else "bf16", "AdamW's moments"):
            assert word in text


class TestExamination:
    def test_the_first_of_four_ranks(self):
        found = examine_model(TARGET, PLAN, ranks=4, units=["Block"])
        assert found["model"] == "Net of tests.sharding.models:Net, on 4 ranks"
        units = 3 if has_dtypes_by_parameter() else 5
        assert (found["parameters"], found["modules_in_fp32"], found["units"]) == (287, 2, units)
        assert found["patterns"] == {
            "LayerNorm": "computes in fp32 (stored fp32; gradients fp32; reduced fp32)",
            "*": "computes in bf16 (stored fp32; gradients fp32; reduced fp32)",
        }
        assert found["bytes_per_parameter"]["weights"] == pytest.approx(4 / 4, rel=0.3)  # and padding
        assert found["collectives"] == (
            {
                "all_gather bf16": "1 call, 152 bytes",
                "all_gather uint8": "4 calls, 1,280 bytes",
                "reduce_scatter fp32": "3 calls, 1,456 bytes",
            }
            if has_dtypes_by_parameter()
            else {
                "all_gather bf16": "5 calls, 1,176 bytes",
                "all_gather fp32": "4 calls, 256 bytes",
                "reduce_scatter fp32": "5 calls, 1,456 bytes",
            }
        )

    @pytest.mark.parametrize(
        ("target", "text"),
        [
            ("models", "'models' is no function: write package.module:function"),
            ("tests.sharding.nothing:make", "cannot import tests.sharding.nothing: No module named"),
            ("tests.sharding.models:Nett", r"has no function 'Nett'; did you mean Net\?"),
        ],
    )
    def test_a_target_that_is_no_function(self, target, text):
        with pytest.raises(ValueError, match=text):
            function_named(target)

    def test_a_function_that_returns_no_model_and_units_that_are_none(self):
        with pytest.raises(ValueError, match="returns DtypePlan; it must return a torch.nn.Module"):
            examine_model("tests.sharding.models:plan", PLAN)
        with pytest.raises(ValueError, match=r"--units 'Blok' is no name or class .* did you mean"):
            examine_model(TARGET, PLAN, ranks=2, units=["Blok"])
        assert not torch.distributed.is_initialized()

    def test_on_the_command_line(self):
        line = [
            "doctor",
            "--precision",
            "bf16",
            "--model",
            TARGET,
            "--ranks",
            "2",
            "--units",
            "Block",
            "--json",
        ]
        answer = CliRunner().invoke(app, line)
        report = json.loads(answer.stdout)
        assert report["model"]["units"] == 3
        assert set(report["model"]["collectives"]) == {"all_gather bf16", "reduce_scatter fp32"}
        bad = CliRunner().invoke(app, ["doctor", "--precision", "bf16", "--model", "nothing"])
        assert bad.exit_code == 2
        assert "write package.module:function" in bad.stderr


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
