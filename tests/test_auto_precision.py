"""Which precision does "auto" choose, and which formats are fast on a device?

Devices' capabilities are faked, because no test machine has them all.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import amp_plugin
from amp_plugin import hardware
from amp_plugin.cli.app import app

XMX = "has_subgroup_matrix_multiply_accumulate"


def fake(monkeypatch, device, told):
    """Make torch report a device with a compute capability, an architecture of AMD, or features."""
    hardware._log_once.cache_clear()
    is_amd = isinstance(told, str)
    monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: device == "xpu")
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.xpu, "get_device_capability", lambda _: dict.fromkeys(told, True))
    major, minor = told if device == "cuda" and not is_amd else (9, 0)
    properties = SimpleNamespace(name="a GPU", major=major, minor=minor, gcnArchName=told)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = {"cpu_name": "a processor", **dict.fromkeys((told or ()) if device == "cpu" else (), True)}
    monkeypatch.setattr(hardware, "cpu_capabilities", lambda: found if told is not None else {})


TABLE = [
    # NVIDIA: compute capability
    ("cuda", (6, 0), "fp32", ()),
    ("cuda", (6, 1), "fp32", ()),
    ("cuda", (7, 0), "fp16", ()),
    ("cuda", (7, 5), "fp16", ()),  # is_bf16_supported() is true, but bf16 is emulated
    ("cuda", (8, 0), "bf16", ()),
    ("cuda", (8, 6), "bf16", ()),
    ("cuda", (8, 9), "bf16", ("fp8", "fp8-rowwise")),
    ("cuda", (9, 0), "bf16", ("fp8", "fp8-rowwise")),
    ("cuda", (10, 0), "bf16", ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")),
    ("cuda", (10, 3), "bf16", ("fp8", "fp8-rowwise", "mxfp8", "nvfp4")),
    ("cuda", (12, 0), "bf16", ("fp8", "fp8-rowwise")),
    # AMD: all report a compute capability of 9 or more
    ("cuda", "gfx803", "fp32", ()),
    ("cuda", "gfx906:sramecc+:xnack-", "fp16", ()),
    ("cuda", "gfx908", "bf16", ()),
    ("cuda", "gfx90a", "bf16", ()),
    ("cuda", "gfx942:sramecc+", "bf16", ("fp8", "fp8-rowwise")),
    ("cuda", "gfx1030", "fp16", ()),
    ("cuda", "gfx1100", "bf16", ()),
    ("cuda", "gfx1201", "bf16", ("fp8", "fp8-rowwise")),
    # Intel's GPUs
    ("xpu", ("has_fp16",), "fp32", ()),
    ("xpu", ("has_fp16", XMX), "bf16", ()),
    # processors: instruction sets
    ("cpu", ("avx2", "fma3", "f16c"), "fp32", ()),
    ("cpu", ("avx2", "avx512_f", "avx512_vnni"), "fp32", ()),
    ("cpu", ("avx2", "avx512_bf16"), "bf16", ()),
    ("cpu", ("amx_tile", "amx_int8"), "fp32", ()),
    ("cpu", ("amx_tile", "amx_bf16"), "bf16", ()),
    ("cpu", ("avx512_fp16",), "fp16", ()),
    ("cpu", ("neon", "fp16_arith"), "fp16", ()),
    ("cpu", ("neon", "fp16_arith", "bf16"), "bf16", ()),
    ("cpu", None, "fp32", ()),  # an older torch does not report instruction sets
    # devices about which nothing is known
    ("mps", (), "fp32", ()),
    ("cuda-not-here", (), "fp32", ()),
]


@pytest.mark.parametrize(("device", "told", "precision", "narrow"), TABLE)
def test_the_choice_follows_the_hardware(device, told, precision, narrow, monkeypatch) -> None:
    fake(monkeypatch, device, told)
    choice = amp_plugin.choose_precision(device)
    assert (choice.precision, choice.device) == (precision, device)
    assert choice.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    described = hardware.hardware_of(device)
    below = [name for name in ("fp8", "fp8-rowwise", "mxfp8", "nvfp4") if described.computes(name)]
    assert below == [*narrow]


@pytest.mark.parametrize(
    ("device", "told", "reason"),
    [
        ("cuda", (7, 5), "cuda (a GPU, sm_75) computes fp16 fast, and bf16 at best by emulation"),
        ("cuda", (9, 0), "cuda (a GPU, sm_90) computes bf16 fast"),
        ("cuda", "gfx1030", "cuda (a GPU, gfx1030) computes fp16 fast, and bf16 at best by emulation"),
        ("cpu", ("avx2", "avx512_bf16"), "cpu (a processor, avx512_bf16) computes bf16 fast"),
        ("cpu", ("avx2",), "cpu (a processor) computes neither bf16 nor fp16 fast"),
        ("mps", (), "torch does not say whether mps computes 16 bits fast"),
    ],
)
def test_choice_and_reason_are_logged_once(device, told, reason, monkeypatch, caplog) -> None:
    fake(monkeypatch, device, told)
    with caplog.at_level(logging.INFO, logger="amp_plugin"):
        for _ in range(2):
            choice = hardware.auto_precision(device)
    assert choice.reason == reason
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"precision 'auto' is {choice.precision} on {device}: {reason}"]


# -- the entry points ----------------------------------------------------------------------------

PROCESSORS = [(("avx512_bf16",), "bf16"), (("fp16_arith",), "fp16"), (("avx2",), "fp32")]


@pytest.mark.parametrize(("told", "precision"), PROCESSORS)
def test_each_entry_point_computes_in_the_choice(told, precision, monkeypatch) -> None:
    pytest.importorskip("lightning")
    from amp_plugin.adapters.ignite import IgnitePrecision

    fake(monkeypatch, "cpu", told)
    for door in (amp_plugin.AmpPrecision, amp_plugin.FabricAmpPrecision, IgnitePrecision):
        plugin = door("auto")
        assert plugin.session.precision == precision
        assert (plugin.scaler is not None) == (precision == "fp16")
    stock = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[precision]
    assert amp_plugin.AmpPrecision("auto").precision == stock


@pytest.mark.parametrize("from_environment", [False, True])
@pytest.mark.parametrize(("told", "precision"), PROCESSORS)
def test_accelerate_computes_in_the_choice(told, precision, from_environment, monkeypatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    fake(monkeypatch, "cpu", told)
    AcceleratorState._reset_state(reset_partial_state=True)
    given = {} if from_environment else {"mixed_precision": "auto"}
    if from_environment:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "auto")
    found = amp_plugin.AmpAccelerator(cpu=True, **given).mixed_precision
    AcceleratorState._reset_state(reset_partial_state=True)
    assert found == {"fp32": "no"}.get(precision, precision)


def test_weights_are_checked_against_the_choice(monkeypatch) -> None:
    pytest.importorskip("lightning")
    fake(monkeypatch, "cpu", ("avx512_bf16",))
    assert amp_plugin.AmpPrecision("auto", weights="bf16").session.precision == "bf16"
    with pytest.raises(amp_plugin.OptionError, match="weights='fp16' needs precision='fp16', not 'bf16'"):
        amp_plugin.AmpPrecision("auto", weights="fp16")


def test_a_model_on_another_device_than_the_choice_is_an_error(monkeypatch) -> None:
    pytest.importorskip("lightning")
    fake(monkeypatch, "cuda", (9, 0))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    plugin = amp_plugin.AmpPrecision("auto")
    assert plugin.session.precision == "bf16"
    with pytest.raises(amp_plugin.OptionError, match=r"'auto' chose 'bf16' .* on 'cpu', .* device='cpu'"):
        plugin.session.begin("cpu")
    assert amp_plugin.AmpPrecision("auto", device="cpu").session.precision == "fp32"


# -- the commands -------------------------------------------------------------------------------


def test_doctor_shows_the_choice_and_its_reason(monkeypatch) -> None:
    fake(monkeypatch, "cpu", ("avx2",))
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--precision", "auto"]).stdout)
    reason = "cpu (a processor) computes neither bf16 nor fp16 fast"
    assert (report["plan"]["precision"], report["plan"]["auto"]) == ("fp32", reason)
    cpu = report["devices"][0]
    assert (cpu["fast"], cpu["auto"], cpu["auto_because"]) == ([], "fp32", reason)
    text = CliRunner().invoke(app, ["doctor", "--precision", "auto"]).stdout
    assert f"auto_because {reason}" in " ".join(text.split())


PROGRAM = """
import torch
print(torch.get_autocast_dtype("cpu"))
with torch.autocast("cpu"):
    print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
"""


def test_run_gives_a_program_the_choice(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "amp_plugin", "run", "--precision", "auto", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    choice = amp_plugin.choose_precision("cpu" if not torch.accelerator.is_available() else None)
    assert f"amp-plugin run: --precision auto is {choice.precision}: {choice.reason}" in done.stderr
    if choice.precision != "fp32":
        assert done.stdout.split()[-1] == str(choice.dtype)
