"""amp-plugin export: the model of a checkpoint as safetensors, exact or rounded, from whoever has saved it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from amp_plugin import AmpPrecision
from amp_plugin.cli import app
from amp_plugin.weights.weight import FORMATS
from tests.adapters.accelerate_pair import ours, reset
from tests.adapters.lightning_models import Linear, fit


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


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
    model = Tied()
    torch.save(
        model.state_dict() if key is None else {"epoch": 3, key: model.state_dict()}, tmp_path / "a.pt"
    )
    text = export_same(tmp_path / "a.pt", target, model.state_dict())
    assert "7 tensors" in text
    assert "in fp32" in text
    Tied().load_state_dict(load_file(target))  # tied weights are there under both names


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_rounded_once_and_counts_are_not(tmp_path, target, name, dtype):
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    wanted = {key: v.to(dtype) if v.is_floating_point() else v for key, v in model.state_dict().items()}
    export_same(tmp_path / "a.pt", target, wanted, "--dtype", name)


def test_a_prefix_and_what_compile_adds_are_dropped(tmp_path, target):
    model = nn.ModuleDict({"net": torch.compile(nn.Linear(2, 1)), "loss": nn.Linear(1, 1)})
    torch.save({"model": model.state_dict()}, tmp_path / "a.pt")
    assert export(tmp_path / "a.pt", target, "--prefix", "net.")[0] == 0
    assert load_file(target).keys() == {"weight", "bias"}
    code, text = export(tmp_path / "a.pt", target, "--force", "--prefix", "no.")
    assert code == 1
    assert "no weight's name begins with 'no.'" in text


@pytest.mark.filterwarnings("ignore")
def test_lightnings_checkpoint_with_stored_weights(tmp_path, target):
    module = Linear(torch.optim.AdamW)
    data = DataLoader(TensorDataset(torch.ones(6, 8), torch.ones(6, 1)), 2)
    trainer = fit(module, AmpPrecision("bf16", weights="bf16"), steps=3, data=data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    export_same(tmp_path / "last.ckpt", target, module.state_dict())


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
    stored = ("0.weight", "2.weight")
    halves = {name: pack(value, form) if name in stored else (value, None) for name, value in wanted.items()}
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


def pack(value, form):
    return FORMATS[form].split(value)


def test_shards_of_one_model_are_put_together(tmp_path, target):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert export(tmp_path, target.with_name("whole.safetensors"))[0] == 0
    assert load_file(target.with_name("whole.safetensors")).keys() == {"a", "b"}
    save_file({"b": torch.zeros(2)}, tmp_path / "model_1.safetensors")
    assert "holds several models: export" in export(tmp_path, target)[1]


class Odd:
    pass


def test_what_cannot_be_exported_says_what_to_do(tmp_path, target):
    assert "checkpoint 'no.ckpt' does not exist" in export("no.ckpt", target)[1]
    assert "holds no model.safetensors" in export(tmp_path, target)[1]
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").touch()
    assert "dcp_to_torch" in export(tmp_path / "sharded", target)[1]
    torch.save({"net": Tied().state_dict(), "epoch": 1}, tmp_path / "a.pt")
    assert "give --key, one of 'net', 'epoch'" in export(tmp_path / "a.pt", target)[1]
    assert (
        "under ne; give --key, one of 'net', 'epoch'; did you mean net?"
        in export(tmp_path / "a.pt", target, "--key", "ne")[1]
    )
    assert export(tmp_path / "a.pt", target, "--key", "net")[0] == 0
    assert "exists; give another name, or --force" in export(tmp_path / "a.pt", target)[1]
    assert "name it model.safetensors" in export(tmp_path / "a.pt", tmp_path / "model.pt")[1]
    torch.save({"model": Tied().state_dict(), "odd": Odd()}, tmp_path / "b.pt")
    code, text = export(tmp_path / "b.pt", target, "--force")
    assert code == 1
    assert "give --trust" in text
    assert "Odd" in text
    result = CliRunner().invoke(
        app, ["export", str(tmp_path / "b.pt"), str(target), "--force", "--trust", "--json"]
    )
    assert json.loads(result.stdout)["tensors"] == 7
    torch.save([1, 2], tmp_path / "c.pt")
    assert "holds a list, not a dict" in export(tmp_path / "c.pt", target, "--force")[1]
