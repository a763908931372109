import json

import pytest
import torch

from tests.adapters.accelerate_ranks import main
from tests.warm_processes import call_on_ranks

TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available(),
    reason="needs two CUDA devices and NCCL",
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def ranks(request, tmp_path_factory):
    """What two processes report: of a gloo group on the CPU, or of an NCCL group."""
    folder = tmp_path_factory.mktemp("ranks")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if request.param == "cpu" else {}
    for rank in call_on_ranks(2, 200, main, folder, request.param, **hidden):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
class TestDistributedDataParallel:
    def test_processes_form_one_group_without_a_gpu_too(self, ranks):
        kinds = {(report["ddp"]["kind"], report["ddp"]["device"]) for report in ranks}
        assert kinds in (
            {("DistributedType.MULTI_CPU", "cpu")},
            {("DistributedType.MULTI_GPU", "cuda")},
        )

    def test_gradients_are_averaged_unscaled_and_clipped_once_a_window(self, ranks):
        for report in ranks:
            assert report["ddp"]["norm"] == pytest.approx(9.0)  # ((2 + 6) / 2 + 0.5) four times
            assert report["ddp"]["weight"] == pytest.approx([-0.5] * 4)
            assert report["ddp"]["scale"] == 16.0

    def test_an_overflow_on_one_rank_skips_the_step_on_both(self, ranks):
        for report in ranks:
            assert report["ddp"]["skipped"]
            assert report["ddp"]["scale_after"] == 8.0
            assert report["ddp"]["weight_after"] == report["ddp"]["weight"]
            assert report["ddp"]["rate"] == 0.25  # once for each process, and not for the skipped step


@pytest.mark.dist
@pytest.mark.parametrize("run", ["fp16", "bf16", "fsdp1"])
class TestFullyShardedDataParallel:
    """FSDP2 in fp16 and bf16, FSDP1 in fp16."""

    def test_the_region_is_open_and_outputs_are_fp32(self, ranks, run):
        dtype = torch.bfloat16 if run == "bf16" else torch.float16
        for report in ranks:
            assert report[run]["kind"] == "DistributedType.FSDP"
            assert report[run]["inside"] == str((dtype, True))
            assert report[run]["output"] == "torch.float32"
            assert report[run]["scaled"] == (run != "bf16")

    def test_norms_are_those_of_one_process(self, ranks, run):
        for report in ranks:
            assert report[run]["norms"] == pytest.approx(report[run]["wanted"], rel=0.05)

    def test_saving_and_loading_count_as_no_step(self, ranks, run):
        for report in ranks:
            assert report[run]["tracker"] == 0

    def test_an_overflow_on_one_rank_skips_the_step_on_both(self, ranks, run):
        for report in ranks:
            assert report[run].get("skipped", True)
            assert report[run].get("unchanged", True)
        named = {name for report in ranks for name in report[run].get("overflowed", ["first.weight"])}
        assert any(name.endswith("first.weight") for name in named)
