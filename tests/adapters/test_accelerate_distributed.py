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
    """Return the reports of two processes, in a gloo group on the CPU or in an NCCL group on GPUs."""
    folder = tmp_path_factory.mktemp("ranks")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if request.param == "cpu" else {}
    for rank in call_on_ranks(2, 200, main, folder, request.param, **hidden):
        assert rank.returncode == 0, rank.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
def test_ddp_clips_once_a_window_and_skips_on_both_ranks(ranks):
    for report in [report["ddp"] for report in ranks]:
        # the CPU uses one process group as well
        assert report["kind"] in (["MULTI_CPU", "cpu"], ["MULTI_GPU", "cuda"])
        assert report["norm"] == pytest.approx(9.0)  # the norm of four elements, each (2 + 6) / 2 + 0.5
        assert report["weight"] == pytest.approx([-0.5] * 4)
        assert report["scale"] == 16.0
        assert report["skipped"]
        assert report["scale_after"] == 8.0
        assert report["weight_after"] == report["weight"]
        assert report["rate"] == 0.25  # the scheduler advanced once per process, and not for the skipped step


@pytest.mark.dist
@pytest.mark.parametrize("run", ["fp16", "bf16", "fsdp1"])
def test_fsdp_has_region_norms_and_skips_of_one_process(ranks, run):
    """Dtypes, norms and skips equal those of one process: FSDP2 in fp16 and bf16, FSDP1 in fp16. Saving and
    loading do not count as steps.
    """
    dtype = torch.bfloat16 if run == "bf16" else torch.float16
    for report in [report[run] for report in ranks]:
        assert report["inside"] == str((dtype, True))
        assert report["output"] == "torch.float32"
        assert report["norm"] == pytest.approx(4.0)
        assert report["tracker"] == 0
        assert (report["skipped"], report["unchanged"]) == (run != "bf16",) * 2
    named = [name for report in ranks for name in report[run]["overflowed"]]
    assert [name.endswith("linear.weight") for name in named] == [True] * (run != "bf16")
