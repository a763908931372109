"""The dtype plan, the policies made from it, and conflicts with other settings, on one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from amp_plugin import (
    AmpPrecision,
    DtypePlan,
    FabricAmpPrecision,
    fully_shard,
    log_collectives,
    store_weights,
)
from amp_plugin.adapters.accelerate.forward import fp32_units_apart, give_policy
from amp_plugin.adapters.session import Session
from amp_plugin.options import PrecisionOptions
from amp_plugin.scaling.words import Words
from amp_plugin.sharding.fully_shard import add_up_in_fp32, fsdp1_policy, has_dtypes_by_parameter, policy_of
from amp_plugin.sharding.report import check_against_plan, shard_units
from amp_plugin.weights.weight import half_of
from tests.process_groups import group_of_one
from tests.sharding.models import Net

BF16, FP32 = torch.bfloat16, torch.float32
BY_PARAMETER = pytest.mark.skipif(
    not has_dtypes_by_parameter(), reason="torch before 2.15 gathers a unit in one dtype"
)


@pytest.fixture(scope="module")
def mesh():
    with group_of_one():
        yield init_device_mesh("cpu", (1,))


class TestPlan:
    def test_named_modules_and_all_inside_them_stay_in_fp32(self):
        net = Net()
        plan = DtypePlan(compute="fp16", fp32_modules=["LayerNorm", "blocks.1"], reduce="bf16")
        named = {net.blocks[0].norm, *net.blocks[1].modules()}
        assert plan.in_fp32(net) == named
        assert (plan.compute_dtype, plan.reduce_dtype) == (torch.float16, BF16)

    def test_a_plan_that_computes_in_fp32_keeps_all_of_a_model_there(self):
        net = Net()
        assert DtypePlan(compute="fp32").in_fp32(net) == {*net.modules()}
        assert DtypePlan(compute="bf16").in_fp32(net) == set()

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"compute": "half"}, r"compute='half' is not allowed; .*did you mean compute='fp16'"),
            ({"reduce": "fp16"}, r"reduce='fp16' is not allowed; give 'fp32' or 'bf16'"),
            ({"reduce": "float32"}, r"did you mean reduce='fp32'\?"),
            ({"weights": "fp16"}, r"weights='fp16' needs compute='fp16', not 'bf16'"),
        ],
    )
    def test_values_that_are_not_allowed(self, options, text):
        with pytest.raises(ValueError, match=text):
            DtypePlan(**options)

    def test_dtypes_are_understood_and_one_string_is_no_list(self):
        assert DtypePlan(compute=BF16, reduce=FP32).compute == "bf16"
        with pytest.raises(TypeError, match=r"fp32_modules='head' is one string; give a list: \['head'\]"):
            DtypePlan(fp32_modules="head")


class TestFullyShard:
    @pytest.mark.skipif(has_dtypes_by_parameter(), reason="torch from 2.15 on needs no units of their own")
    def test_units_and_modules_in_fp32_have_policies_of_their_own(self, mesh):
        net = Net()
        fully_shard(net, DtypePlan(fp32_modules=["LayerNorm"]), units=net.blocks, mesh=mesh)
        gathered = {unit.name: (unit.gathered, unit.reduced, unit.stored) for unit in shard_units(net)}
        assert gathered == {
            **{f"blocks.{i}.norm": (FP32, FP32, (FP32,)) for i in (0, 1)},
            **{f"blocks.{i}": (BF16, FP32, (FP32,)) for i in (0, 1)},
            "": (BF16, FP32, (FP32,)),
        }

    @BY_PARAMETER
    def test_weights_in_fp32_travel_beside_others(self, mesh):
        net = Net()
        fully_shard(net, DtypePlan(fp32_modules=["LayerNorm"]), units=net.blocks, mesh=mesh)
        assert {unit.name: unit.gathered for unit in shard_units(net)} == {
            "blocks.0": torch.uint8,
            "blocks.1": torch.uint8,
            "": BF16,
        }
        assert {unit.reduced for unit in shard_units(net)} == {FP32}
        seen = {}

        def note(module, *_):
            seen[type(module).__name__] = module.weight.dtype

        for module in (net.blocks[0].norm, net.blocks[0].up):
            module.register_forward_pre_hook(note)
        with torch.autocast("cpu", dtype=BF16):
            net(torch.ones(2, 5)).sum().backward()
        assert seen == {"LayerNorm": FP32, "Linear": BF16}

    @BY_PARAMETER
    def test_frozen_weights_in_16_bits_of_a_module_in_fp32_need_a_unit(self, mesh):
        net = Net()
        net.blocks[0].norm.bfloat16().requires_grad_(False)
        fully_shard(net, DtypePlan(fp32_modules=["LayerNorm"]), units=net.blocks, mesh=mesh)
        gathered = {unit.name: unit.gathered for unit in shard_units(net)}
        assert gathered == {"blocks.0.norm": FP32, "blocks.0": BF16, "blocks.1": torch.uint8, "": BF16}

    @BY_PARAMETER
    def test_accelerates_units_gather_weights_in_fp32_beside_others(self, mesh):
        from torch.distributed import fsdp

        net, dtypes = Net(), DtypePlan(fp32_modules=["LayerNorm"])
        with fp32_units_apart([net], dtypes):
            for module in (*net.blocks, net):
                fsdp.fully_shard(module, mesh=mesh, mp_policy=policy_of(dtypes))
        assert [unit.gathered for unit in shard_units(net)] == [torch.uint8, torch.uint8, BF16]

    def test_labels_are_not_rounded_where_a_model_takes_them(self, mesh):
        class Loss(nn.Linear):
            def forward(self, x, label):
                self.seen = label.dtype
                return super().forward(x) - label

        model = fully_shard(Loss(3, 1), DtypePlan(), mesh=mesh)
        with torch.autocast("cpu", dtype=BF16):
            model(torch.ones(2, 3), torch.ones(2, 1))
        assert model.seen is FP32

    def test_names_may_start_from_a_module_that_holds_the_model(self, mesh):
        holder = nn.ModuleDict({"net": Net()})
        fully_shard(holder["net"], DtypePlan(fp32_modules=["net.head"]), root=holder, mesh=mesh)
        apart = {"net.head": FP32, "net": BF16}
        found = {unit.name: unit.gathered for unit in shard_units(holder)}
        assert found == ({"net": torch.uint8} if has_dtypes_by_parameter() else apart)
        with pytest.raises(ValueError, match="root=Net does not hold this Linear"):
            fully_shard(nn.Linear(1, 1), DtypePlan(), root=Net(), mesh=mesh)

    def test_what_it_does_not_take(self, mesh):
        net = Net()
        with pytest.raises(ValueError, match="mp_policy is made from the plan"):
            fully_shard(net, DtypePlan(), mp_policy=MixedPrecisionPolicy())
        with pytest.raises(ValueError, match="a Linear among units is not a module of Net"):
            fully_shard(net, DtypePlan(), units=[nn.Linear(1, 1)], mesh=mesh)

    def test_a_plan_may_store_weights(self, mesh):
        net = fully_shard(Net(), DtypePlan(fp32_modules=["head"], weights="bf16"), mesh=mesh)
        stored = {name for name, param in net.named_parameters() if half_of(param).dtype is BF16}
        assert stored == {name for name, _ in net.named_parameters()} - {"head.weight", "head.bias"}
        units = {"": (BF16, FP32)} if has_dtypes_by_parameter() else {"": (BF16,), "head": (FP32,)}
        assert {unit.name: unit.stored for unit in shard_units(net)} == units

    def test_the_report_of_a_unit_names_each_dtype_in_which_it_stores_weights(self, mesh):
        net = fully_shard(Net(), DtypePlan(), mesh=mesh)
        store_weights(net, fp32_modules=["LayerNorm", "inp"])
        (unit,) = shard_units(net)
        assert unit.stored == (FP32, BF16)  # ``inp`` is the first layer

    def test_micro_batches_add_up_in_fp32_without_gradient_sync(self, mesh):
        added = []
        for reduce in ("fp32", "bf16"):
            model = fully_shard(nn.Linear(1, 1, bias=False), DtypePlan(reduce=reduce), mesh=mesh)
            for micro_batch in range(257):
                model.set_requires_gradient_sync(micro_batch == 256)
                one_backward(model)
            added.append(model.weight.grad.full_tensor().item())
        assert_added_up(*added)


def one_backward(model):
    with torch.autocast("cpu", dtype=BF16):
        loss = model(torch.full((1, 1), 1 + 2**-7)).float().sum()
    loss.backward()


def assert_added_up(in_fp32, otherwise):
    """Compare sums of 257 gradients of 1 + 1/128. A sum in bf16 loses the fractions."""
    assert in_fp32 == 257 * (1 + 2**-7)
    assert otherwise != in_fp32  # shows that the sum distinguishes the two


def wrapped(model, policy):
    return FullyShardedDataParallel(
        model, mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


class TestContradictions:
    @pytest.mark.parametrize(
        "policy",
        [
            MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
            pytest.param(
                MixedPrecisionPolicy(param_dtype=BF16),
                marks=pytest.mark.skipif(
                    has_dtypes_by_parameter(), reason="torch from 2.15 on reduces in the stored dtype then"
                ),
            ),
        ],
    )
    def test_a_policy_that_reduces_in_16_bits_is_told(self, mesh, policy):
        model = torch_fully_shard(Net(), mesh=mesh, mp_policy=policy)
        with pytest.warns(
            UserWarning, match=r"1 of 1 FSDP units .* reduce gradients in torch.bfloat16, as their own"
        ):
            check_against_plan(model, DtypePlan())
        check_against_plan(model, DtypePlan(reduce="bf16"))  # no warning, because the plan asks for it

    def test_weights_of_a_module_in_fp32_that_would_be_gathered_in_16_bits(self, mesh):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        model = torch_fully_shard(Net(), mesh=mesh, mp_policy=policy)
        with pytest.raises(
            ValueError, match=r"'blocks.0.norm', but the fsdp2 unit 'model' .* torch.bfloat16"
        ):
            check_against_plan(model, DtypePlan(fp32_modules=["LayerNorm"]))

    @BY_PARAMETER
    def test_a_rounded_weight_is_found_beside_weights_in_fp32(self, mesh):
        net = Net()
        kept = {id(param) for param in net.head.parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=BF16,
            reduce_dtype=FP32,
            param_dtype_override_fn=lambda param: FP32 if id(param) in kept else None,
        )
        model = torch_fully_shard(net, mesh=mesh, mp_policy=policy)
        assert check_against_plan(model, DtypePlan(fp32_modules=["head"]))
        with pytest.raises(ValueError, match=r"'inp', but the fsdp2 unit 'model' .* torch.bfloat16"):
            check_against_plan(model, DtypePlan(fp32_modules=["inp"]))

    @pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # a single rank has all weights
    @pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")
    @pytest.mark.parametrize("name", ["blocks.0.norm", "head", "LayerNorm"])
    def test_names_are_found_in_a_model_that_fsdp1_has_wrapped(self, mesh, name):
        wide, narrow = (
            wrapped(Net(), MixedPrecision(param_dtype=dtype, reduce_dtype=FP32)) for dtype in (FP32, BF16)
        )
        assert check_against_plan(wide, DtypePlan(fp32_modules=[name]))
        with pytest.raises(ValueError, match=r"but the fsdp1 unit 'model' gathers .* in torch.bfloat16"):
            check_against_plan(narrow, DtypePlan(fp32_modules=[name]))

    def test_the_plans_own_shards_and_whole_models_pass(self, mesh):
        net, dtypes = Net(), DtypePlan(fp32_modules=["LayerNorm"])
        assert not check_against_plan(net, dtypes)
        sharded = fully_shard(net, dtypes, mesh=mesh)
        assert check_against_plan(sharded, dtypes)
        units = list(shard_units(sharded))
        assert {unit.gathered for unit in units} == (
            {torch.uint8} if has_dtypes_by_parameter() else {BF16, FP32}
        )
        assert {unit.reduced for unit in units} == {FP32}

    def test_another_precision_in_evaluation(self):
        with pytest.raises(ValueError, match="eval_precision='fp32' does not work under FSDP, which gathers"):
            Session(PrecisionOptions(eval_precision="fp32"), "bf16").check_sharded()
        for in_eval, precision in ((None, "bf16"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp32")):
            Session(PrecisionOptions(eval_precision=in_eval), precision).check_sharded()


class TestFirstVersion:
    def test_gradients_are_reduced_and_buffers_kept_in_fp32(self):
        policy = fsdp1_policy(DtypePlan(compute="fp16"))
        assert (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) == (torch.float16, FP32, FP32)
        assert not policy.cast_forward_inputs
        assert fsdp1_policy(DtypePlan(reduce="bf16")).reduce_dtype is BF16

    @pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # a single rank has all weights
    @pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")
    def test_micro_batches_add_up_in_fp32_without_sync(self, mesh):
        added = []
        for prepare in (add_up_in_fp32, lambda _: None):
            model = wrapped(nn.Linear(1, 1, bias=False), fsdp1_policy(DtypePlan()))
            prepare(model)
            for micro_batch in range(257):
                with model.no_sync() if micro_batch < 256 else nullcontext():
                    one_backward(model)
            added.append(next(model.parameters()).grad.item())
        assert_added_up(*added)

    def test_it_has_one_dtype_for_all_weights(self):
        assert fsdp1_policy(DtypePlan(fp32_modules=["LayerNorm"])).param_dtype is FP32


class TestAdapters:
    @pytest.mark.parametrize("plugin", [AmpPrecision, FabricAmpPrecision])
    def test_lightnings_strategy_for_fsdp_gets_the_plans_policy(self, plugin):
        assert plugin("bf16").mixed_precision_config == fsdp1_policy(DtypePlan(compute="bf16"))
        assert plugin("fp16", reduce="bf16").mixed_precision_config.reduce_dtype is BF16
        assert plugin("fp16", fp32_modules=["head"]).dtype_plan == DtypePlan(
            compute="fp16", fp32_modules=["head"]
        )
        with pytest.raises(ValueError, match="reduce='fp16' is not allowed"):
            plugin("fp16", reduce="fp16")

    @pytest.mark.parametrize("kind", [MixedPrecision, MixedPrecisionPolicy])
    def test_accelerates_own_policy_is_replaced_and_the_users_is_not(self, kind):
        class Plugin:
            mixed_precision_policy = kind(BF16, BF16, BF16)

        dtypes = Session(PrecisionOptions(), "bf16").dtype_plan
        give_policy(Plugin, dtypes, fp32_outputs=True)
        given = Plugin.mixed_precision_policy
        assert (given.param_dtype, given.reduce_dtype) == (BF16, FP32)
        Plugin.mixed_precision_policy = chosen = kind(param_dtype=BF16)
        give_policy(Plugin, dtypes, fp32_outputs=True)
        assert Plugin.mixed_precision_policy is chosen

    def test_outputs_keep_accelerates_dtype_where_they_are_not_to_be_fp32(self):
        class Plugin:
            mixed_precision_policy = MixedPrecisionPolicy(BF16, BF16, BF16)

        dtypes = Session(PrecisionOptions(), "bf16").dtype_plan
        give_policy(Plugin, dtypes, fp32_outputs=False)
        assert Plugin.mixed_precision_policy.output_dtype is BF16

    def test_where_nothing_is_sharded_reduce_has_no_effect_and_that_is_told(self):
        with pytest.warns(UserWarning, match="reduce='bf16' has an effect under FSDP only.*use a hook"):
            Session(PrecisionOptions(reduce="bf16"), "bf16", words=Words(reduce="a hook")).check_shards(Net())
        with pytest.warns(UserWarning, match="reduce='bf16' has an effect under FSDP only, and this model"):
            AmpPrecision("bf16", reduce="bf16")._check_shards(Net())


def test_a_log_of_collectives_counts_equal_calls_in_one_row(mesh):
    import torch.distributed as dist

    with log_collectives() as log:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=BF16), 0)
    assert [(call.op, call.dtype, call.elements, call.bytes, call.ranks) for call in log] == [
        ("all_reduce", "fp32", 3, 12, 1),
        ("all_reduce", "fp32", 3, 12, 1),
        ("broadcast", "bf16", 2, 4, 1),
    ]
    assert log.table().row_count == 2
    assert len(log) == 3
