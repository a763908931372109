"""Each CUDA case of torch's own autocast tests gives the same as under torch.autocast, on fake GPU tensors.

The cases include ops that torch's op database lacks. tests/casting/test_every_op.py covers that database.
"""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import amp_plugin
from amp_plugin.casting.installed_kernels import KERNELS
from tests.torchs_own import torchs_own

MODULES = {"nn": torch._C._nn, "linalg": torch._C._linalg, "methods": None}
LISTS = ("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16", "torch_fp32", "nn_fp32", "methods_fp32")
LISTS += ("torch_need_autocast_promote", "torch_expect_builtin_promote", "methods_expect_builtin_promote")
# cross without dim, chain_matmul
pytestmark = pytest.mark.filterwarnings("ignore:Using torch.cross", "ignore:torch.chain_matmul")


def calls(lists, name):
    """Yield the function and the method of each case, with arguments.

    Arguments that are cast to 16 bits are float32.
    """
    module = MODULES.get(name.split("_")[0], torch)
    for op, first, *others in getattr(lists, name):
        is_einsum = isinstance(first, str)  # einsum takes its equation as a separate argument
        args, rest = ((first, *others[0]), others[1:]) if is_einsum else (first, others)
        kwargs = next((value for value in rest if isinstance(value, dict)), {})
        if name.endswith("16"):
            args = tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, args)
        of_tensors = [torch.Tensor] if isinstance(args[0], torch.Tensor) else []
        found = [getattr(owner, op) for owner in (module, *of_tensors) if hasattr(owner, op)]
        assert found, op
        yield from ((function, args, kwargs) for function in found)


def outcome(function, args, kwargs):
    """Return the dtypes of the results, or the error."""
    try:
        return str(tree_map_only(torch.Tensor, lambda t: t.dtype, function(*args, **kwargs)))
    except Exception as error:  # noqa: BLE001 - the error is what is compared
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@contextmanager
def cuda_autocast(*, native):
    """Turn on autocast for CUDA without a CUDA device, where torch.autocast('cuda') disables itself."""
    previous = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    torch.autocast_increment_nesting()
    KERNELS.install()
    amp_plugin.set_default_rules(amp_plugin.OpRules.default("cuda") if native else None)
    try:
        yield
    finally:
        amp_plugin.set_default_rules(None)
        torch.set_autocast_enabled("cuda", previous[0])
        torch.set_autocast_dtype("cuda", previous[1])
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@pytest.mark.native
@pytest.mark.parametrize("name", LISTS)
def test_cuda_cases_with_fake_tensors(name):
    """Ops that cannot run on fake tensors (cuDNN's ops and the GRU cell) raise the same error in both."""
    with FakeTensorMode():
        cases = list(calls(torchs_own("autocast_test_lists").AutocastTestLists("cuda"), name))
        seen = []
        for native in (True, False):
            with cuda_autocast(native=native):
                seen.append([outcome(*case) for case in cases])
    assert seen[0] == seen[1]
    assert sum("Error" in each for each in seen[1]) <= min(6, len(cases) - 1)
