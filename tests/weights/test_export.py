"""amp-plugin export: the model of a checkpoint as safetensors, exact or rounded, from whoever has saved it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from amp_plugin.cli import app
from amp_plugin.weights.weight import FORMATS
from tests.adapters.accelerate_pair import ours, reset


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


def export(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, words)])
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def export_same(source: Path, file: Path, wanted: dict[str, torch.Tensor], *options: str) -> str:
    """Assert that an export has these tensors; return what it says."""
    code, text = export(source, file, *options)
    assert code == 0, text
    found = load_file(file)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name
    return text


@pytest.fixture
def target(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", None])
def test_a_file_of_torch_save_is_exact(tmp_path, target, key):
    state = tied().state_dict()
    torch.save(state if key is None else {"epoch": 3, key: state}, tmp_path / "a.pt")
    text = export_same(tmp_path / "a.pt", target, state)
    assert "7 tensors" in text
    assert "in fp32" in text
    tied().load_state_dict(load_file(target))  # tied weights are there under both names


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_rounded_once_and_counts_are_not(tmp_path, target, name, dtype):
    state = tied().state_dict()
    torch.save(state, tmp_path / "a.pt")
    wanted = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    export_same(tmp_path / "a.pt", target, wanted, "--dtype", name)


def test_a_prefix_and_what_compile_adds_are_dropped(tmp_path, target):
    model = nn.ModuleDict({"net": torch.compile(nn.Linear(2, 1)), "loss": nn.Linear(1, 1)})
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    assert export(tmp_path / "a.pt", target, "--prefix", "net.")[0] == 0
    assert load_file(target).keys() == {"weight", "bias"}
    code, text = export(tmp_path / "a.pt", target, "--force", "--prefix", "no.")
    assert code == 1
    assert "no weight's name begins with 'no.'" in text


@pytest.mark.parametrize("safe", [True, False])
def test_accelerates_folder(tmp_path, target, safe):
    accelerator, model = ours(precision="bf16", weights="bf16"), nn.Linear(4, 2)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.weight.dtype is torch.bfloat16
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    export_same(tmp_path / "state", target, wanted)
    reset()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_low_halves_that_0_2_kept_in_the_optimizer_are_found(tmp_path, target, form):
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    wanted = model.state_dict()
    halves = {n: FORMATS[form].split(v) if v.dim() > 1 else (v, None) for n, v in wanted.items()}
    rests = {number: low for number, (_, low) in enumerate(halves.values()) if low is not None}
    optimizer = {
        **torch.optim.AdamW(model.parameters()).state_dict(),
        "amp_plugin_weights": {"form": form, "steps": 3, "rests": rests},
    }
    state = {name: high for name, (high, _) in halves.items()}
    torch.save({"state_dict": state, "optimizer_states": [optimizer]}, tmp_path / "last.ckpt")
    text = export_same(tmp_path / "last.ckpt", target, wanted)
    assert "2 weights that 0.2 stored in 16 bits are exact" in text
    del rests[4]
    torch.save({"state_dict": state, "optimizer_states": [optimizer]}, tmp_path / "last.ckpt")
    code, text = export(tmp_path / "last.ckpt", target, "--force")
    assert code == 1
    assert "low halves of 1 weights by number, and the 2 weights in 16 bits do not match" in text


def test_shards_of_one_model_are_put_together(tmp_path, target):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert export(tmp_path, target.with_name("whole.safetensors"))[0] == 0
    assert load_file(target.with_name("whole.safetensors")).keys() == {"a", "b"}
    save_file({"b": torch.zeros(2)}, tmp_path / "model_1.safetensors")
    assert "holds several models: export" in export(tmp_path, target)[1]


def test_what_cannot_be_exported_says_what_to_do(tmp_path, target):
    several, odd, a_list = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    for folder in ("empty", "dcp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    torch.save({"net": tied().state_dict(), "epoch": 1}, several)
    torch.save({"model": tied().state_dict(), "odd": Path()}, odd)
    torch.save([1, 2], a_list)
    for source, *options, text in (
        ("no.ckpt", "checkpoint 'no.ckpt' does not exist"),
        (tmp_path / "empty", "holds no model.safetensors"),
        (tmp_path / "dcp", "dcp_to_torch"),
        (several, "give --key, one of 'net', 'epoch'"),
        (several, "--key", "ne", "give --key, one of 'net', 'epoch'; did you mean net?"),
        (odd, "give --trust"),
        (a_list, "holds a list, not a dict"),
    ):
        code, said = export(source, target, *options)
        assert code != 0
        assert text in said
    export_same(several, target, tied().state_dict(), "--key", "net")
    assert "exists; give another name, or --force" in export(several, target)[1]
    assert "name it model.safetensors" in export(several, tmp_path / "model.pt")[1]
    result = CliRunner().invoke(app, ["export", str(odd), str(target), "--force", "--trust", "--json"])
    assert json.loads(result.stdout)["tensors"] == 7
