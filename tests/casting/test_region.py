"""Regions have the semantics of torch's, without the defects of torch's own regions."""

import asyncio
import pickle
import threading
from copy import copy, deepcopy

import pytest
import torch

import amp_plugin
from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.rules import torch_release
from amp_plugin.casting.rules_in_force import uninstall_kernels
from amp_plugin.kernels.build import native_core


def mm_dtype(x=None):
    x = torch.ones(2, 2) if x is None else x
    return (x @ x).dtype


class TestLikeTorch:
    def test_state_is_torchs(self):
        with amp_plugin.autocast("cpu", dtype=torch.float16):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.float16
            with torch.autocast("cpu", enabled=False):
                assert mm_dtype() is torch.float32
            with amp_plugin.autocast("cpu", enabled=False):
                assert mm_dtype() is torch.float32
                assert not torch._C._is_any_autocast_enabled()
            assert mm_dtype() is torch.float16
        assert mm_dtype() is torch.float32

    @pytest.mark.parametrize(
        ("given", "arguments", "kind", "error"),
        [
            (torch.device("cpu"), {}, ValueError, "Expected `device_type` of type `str`"),
            (
                "opengl",
                {"dtype": torch.float16},
                RuntimeError,
                "unsupported autocast device_type|unknown device type",
            ),
            ("cpu", {"dtype": "bf16"}, TypeError, "not a torch.dtype; give torch.bfloat16$"),
            ("cpu", {"dtype": "fp8"}, TypeError, "give torch.float16 or torch.bfloat16$"),
            ("cpu", {"rules": {}}, TypeError, r"OpRules.from_mapping\(\{...\}\) for a mapping"),
            ("cpu", {"rules": "my.yaml"}, TypeError, r"rules='my.yaml': .*OpRules.from_yaml\('rules.yaml'\)"),
        ],
    )
    def test_wrong_arguments(self, given, arguments, kind, error):
        with pytest.raises(kind, match=error):
            amp_plugin.autocast(given, **arguments)
        if "rules" in arguments:
            with pytest.raises(kind, match=error):
                amp_plugin.set_default_rules(arguments["rules"])

    def test_unsupported_dtype_warns_every_time(self):
        for _ in range(2):
            with pytest.warns(UserWarning, match="target dtype is not supported. Disabling autocast"):
                region = amp_plugin.autocast("cpu", dtype=torch.float32)
            with region:
                assert mm_dtype() is torch.float32

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_cuda_region_without_cuda_warns(self):
        for _ in range(2):
            with pytest.warns(UserWarning, match="CUDA is not available"):
                amp_plugin.autocast("cuda")

    def test_wrong_uses(self):
        with pytest.raises(RuntimeError, match="exit without enter; this region is not open in this thread"):
            amp_plugin.autocast("cpu").__exit__(None, None, None)
        if torch_release() != "2.11":  # torch's decorates whatever it is given
            with pytest.raises(TypeError, match="requires a callable, but got int"):
                amp_plugin.autocast("cpu")(3)

    def test_is_autocast_available(self):
        assert amp_plugin.is_autocast_available("cpu")
        assert amp_plugin.is_autocast_available("opengl") is torch.amp.is_autocast_available("opengl")

    def test_it_is_a_torch_autocast(self):
        region = amp_plugin.autocast("cpu")
        assert isinstance(region, torch.autocast)
        assert (region.device, region.fast_dtype, region._enabled) == ("cpu", torch.bfloat16, True)

    def test_reference_pages_rules(self):
        x, out = torch.ones(2, 2), torch.ones(2, 2)
        with amp_plugin.autocast("cpu"):
            assert torch.mm(x, x, out=out).dtype is torch.float32
            assert out.addmm_(x, x).dtype is torch.float32
            assert mm_dtype(x.double()) is torch.float64
            assert torch.sum(x.bfloat16(), dtype=torch.float64).dtype is torch.float64
            assert torch.nn.functional.binary_cross_entropy(x, x).dtype is torch.float32


class TestTorchsDefects:
    """Each test shows a defect of torch 2.13 that amp_plugin does not have."""

    def test_nested_regions_of_different_dtype(self):
        w, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)

        def nested(autocast):
            with autocast("cpu", dtype=torch.bfloat16):
                a = x @ w
                with autocast("cpu", dtype=torch.float16):
                    return a.dtype, (x @ w).dtype

        with pytest.raises(RuntimeError, match="same dtype"):
            nested(torch.autocast)
        assert nested(amp_plugin.autocast) == (torch.bfloat16, torch.float16)

    def test_instance_entered_again(self):
        def reenter(autocast):
            region = autocast("cpu")
            with region, region:
                pass
            return torch.is_autocast_enabled("cpu")

        left_on = reenter(torch.autocast)
        torch.set_autocast_enabled("cpu", False)
        assert left_on
        assert reenter(amp_plugin.autocast) is False

    def test_one_instance_in_two_threads(self):
        region = amp_plugin.autocast("cpu", dtype=torch.float16)
        inside, leave = threading.Barrier(2), threading.Barrier(2)
        seen = {}

        def use(name):
            with region:
                inside.wait(5)
                seen[name, "in"] = mm_dtype()
                leave.wait(5)
            seen[name, "out"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        thread = threading.Thread(target=use, args=("b",))
        thread.start()
        use("a")
        thread.join()
        assert seen["a", "in"] is seen["b", "in"] is torch.float16
        assert seen["a", "out"] == seen["b", "out"] == (False, torch.bfloat16)

    def test_decorated_generator(self):
        seen = []

        def body():
            try:
                sent = yield mm_dtype()
                yield sent, mm_dtype()
            except KeyError:
                yield "caught", mm_dtype()
            finally:
                seen.append(mm_dtype())
            return mm_dtype()

        theirs = torch.autocast("cpu")(body)()
        assert next(theirs) is torch.float32, "torch has mended this"
        theirs.close()
        ours, closed = (amp_plugin.autocast("cpu")(body)() for _ in range(2))
        assert next(ours) is next(closed) is torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")
        assert ours.send(7) == (7, torch.bfloat16)
        assert ours.throw(KeyError()) == ("caught", torch.bfloat16)
        with pytest.raises(StopIteration) as stop:
            next(ours)
        assert stop.value.value is torch.bfloat16
        closed.close()
        assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]

    def test_decorated_coroutines(self):
        async def body():
            before = mm_dtype()
            await asyncio.sleep(0)
            return before, mm_dtype()

        async def outside():
            await asyncio.sleep(0)
            return torch.is_autocast_enabled("cpu")

        async def both(decorated):
            return await asyncio.gather(decorated(), outside())

        assert asyncio.run(both(torch.autocast("cpu")(body)))[0][0] is torch.float32, "torch has mended this"
        decorated = amp_plugin.autocast("cpu")(body)
        assert asyncio.iscoroutinefunction(decorated)
        assert asyncio.run(both(decorated)) == [(torch.bfloat16, torch.bfloat16), False]

    def test_an_asynchronous_generator_is_refused(self):
        async def body():
            yield

        with pytest.raises(TypeError, match="body is an asynchronous generator; open the region"):
            amp_plugin.autocast("cpu")(body)

    def test_decorated_function_keeps_its_name(self):
        forward = amp_plugin.autocast("cpu")(mm_dtype)
        assert (forward.__name__, forward()) == ("mm_dtype", torch.bfloat16)

    @pytest.mark.native
    def test_mixed_half_dtypes_are_promoted(self):
        half, bf16 = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
        with torch.autocast("cpu"), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            torch.cat([half, bf16])
        with amp_plugin.autocast("cpu"):
            assert torch.cat([half, bf16]).dtype is torch.float32
            assert torch.cat([half, half]).dtype is torch.float16
            assert torch.cat([half, bf16.double()]).dtype is torch.float64


@pytest.mark.native
class TestWeightCache:
    @staticmethod
    def casts():
        return native_core().extension.kept_cast_count()

    @pytest.mark.parametrize("kind", ["frozen", "view", "non-leaf", "inference"])
    def test_what_is_never_kept(self, kind):
        w = torch.randn(3, 3, requires_grad=kind != "frozen")
        w = {"view": w.t(), "non-leaf": w * 1}.get(kind, w)
        with torch.inference_mode(kind == "inference"), amp_plugin.autocast("cpu"):
            torch.randn(3, 3) @ w
            assert self.casts() == 0

    def test_dead_weights_at_a_reused_address(self):
        x = torch.ones(2, 2)
        with amp_plugin.autocast("cpu"):
            for value in range(50):
                w = torch.full((2, 2), float(value), requires_grad=True)
                assert (x @ w)[0, 0] == 2 * value
                del w

    def test_threads_do_not_empty_each_others_cache(self):
        w, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)

        def use():
            with amp_plugin.autocast("cpu"):
                x @ w
                if threading.current_thread() is threading.main_thread():
                    thread = threading.Thread(target=use)
                    thread.start()
                    thread.join()
                assert self.casts() == 1

        use()

    @pytest.mark.parametrize("cache_enabled", [True, False])
    def test_torchs_flag_is_the_regions(self, cache_enabled):
        """Checkpoint reads the flag to recompute with the same value.

        On a GPU, graph capture needs it to be off.
        """
        with amp_plugin.autocast("cpu", cache_enabled=cache_enabled):
            assert torch.is_autocast_cache_enabled() == cache_enabled
        assert torch.is_autocast_cache_enabled()


@pytest.mark.native
class TestTorchIsLeftAlone:
    def test_torch_autocast_gives_the_same_bits(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
        x, seen = torch.randn(4, 8), []
        for change, ours in ((uninstall_kernels, False), (KERNELS.install, True)):
            change()
            assert ("amp_plugin" in torch._C._dispatch_dump("aten::mm")) is ours
            model.zero_grad()
            with torch.autocast("cpu"):
                loss = torch.nn.functional.mse_loss(model(x), torch.zeros(4, 2))
            loss.backward()
            seen.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))

    def test_our_kernels_hand_over_to_torchs(self):
        """Only torch's kernel fills torch's cache of weights. So a second use finds the same cast."""
        w, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
        KERNELS.install()
        with torch.autocast("cpu"):
            first, second = x @ w, x @ w
        assert first.grad_fn.next_functions[1][0] is second.grad_fn.next_functions[1][0]
        assert native_core().extension.kept_cast_count() == 0


class Logged:
    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("bases", ["its own", "a mixin's", "an intermediate class's"])
def test_a_subclass_with_an_init_of_its_own_is_refused(bases):
    namespace = {"__init__": lambda self: None} if bases == "its own" else {}
    parents = {
        "its own": (amp_plugin.autocast,),
        "a mixin's": (Logged, amp_plugin.autocast),
        "an intermediate class's": (Logged, type("Between", (amp_plugin.autocast,), {})),
    }
    with pytest.raises(TypeError, match="wrap a region instead: return one from a function"):
        type("Half", parents[bases], namespace)


@pytest.mark.parametrize("remade", [lambda region: region, deepcopy, copy])
def test_a_subclass_without_one_is_a_region(remade):
    kind = type("Named", (amp_plugin.autocast,), {"name": "net"})
    region = remade(kind("cpu", torch.bfloat16))
    with region:
        assert (region.name, mm_dtype()) == ("net", torch.bfloat16)


@pytest.mark.parametrize("kind", [torch.autocast, amp_plugin.autocast])
def test_an_entered_block_says_what_it_found(kind):
    with kind("cpu", dtype=torch.float16, cache_enabled=False):
        block = kind("cpu", dtype=torch.bfloat16)
        for _ in range(2):
            with block:
                found = block.prev, block.prev_fastdtype, block.prev_cache_enabled
            assert found == (True, torch.float16, False)
        assert copy(block).fast_dtype is torch.bfloat16
    with pytest.raises(AttributeError, match="prev"):
        kind("cpu").prev  # noqa: B018


def test_torchs_names_may_be_bound_to_ours(monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", amp_plugin.is_autocast_available)
    monkeypatch.setattr(torch.amp.autocast_mode, "is_autocast_available", amp_plugin.is_autocast_available)
    monkeypatch.setattr(torch, "autocast", amp_plugin.autocast)
    KERNELS.checked.clear()
    assert torch.amp.is_autocast_available("cpu")
    assert not torch.amp.is_autocast_available("opengl")
    with torch.autocast("cpu"):
        assert mm_dtype() is torch.bfloat16


@pytest.mark.native
def test_a_copy_opens_the_same_region():
    """torch's regions can be copied and pickled, and so can ours. A pickle contains the rules themselves."""
    rules = amp_plugin.OpRules.default("cpu").with_rule("aten::softmax.int", "fp32")
    region = amp_plugin.autocast("cpu", dtype=torch.float16, cache_enabled=False, rules=rules)
    for remade in (deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert type(remade) is amp_plugin.autocast
        with remade:
            assert mm_dtype() is torch.float16
            assert torch.softmax(torch.ones(2, dtype=torch.float16), 0).dtype is torch.float32
            assert not torch.is_autocast_cache_enabled()
