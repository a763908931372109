"""amp-plugin export writes the model of any checkpoint as safetensors, exactly or rounded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from amp_plugin.cli import app
from amp_plugin.precision import DTYPES
from amp_plugin.weights.formats import FORMATS
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
    """Assert that an export contains these tensors. Return the command's output."""
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
    tied().load_state_dict(load_file(target))  # tied weights appear under both names


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
    assert "2 weights that amp_plugin 0.2 had stored in 16 bits are exact" in text
    del rests[4]
    torch.save({"state_dict": state, "optimizer_states": [optimizer]}, tmp_path / "last.ckpt")
    code, text = export(tmp_path / "last.ckpt", target, "--force")
    assert code == 1
    assert "remainders of 1 weights by number, but the 2 weights in 16 bits do not match" in text


def test_shards_of_one_model_are_put_together(tmp_path, target):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert export(tmp_path, target.with_name("whole.safetensors"))[0] == 0
    assert load_file(target.with_name("whole.safetensors")).keys() == {"a", "b"}
    save_file({"b": torch.zeros(2)}, tmp_path / "model_1.safetensors")
    assert "holds several models: export" in export(tmp_path, target)[1]


def save_shards(folder, *, ending, write, names=("a", "b")):
    """Write a model in two shards and an index, as transformers and Accelerate do."""
    folder.mkdir()
    stem, suffix = ending
    files = [f"{stem}-0000{number}-of-00002{suffix}" for number in (1, 2)]
    for name, file in zip(names, files, strict=True):
        write({name: torch.ones(2)}, folder / file)
    index = {"metadata": {}, "weight_map": dict(zip("ab", files, strict=True))}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return [folder / file for file in files]


SHARDS = {
    "safetensors": {"ending": ("model", ".safetensors"), "write": save_file},
    "torch.save": {"ending": ("pytorch_model", ".bin"), "write": torch.save},
}


@pytest.mark.parametrize("kind", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("index", [True, False], ids=["with index", "without"])
def test_a_model_without_one_of_its_shards_is_refused(tmp_path, target, kind, index):
    first, second = save_shards(tmp_path / "saved", **kind)
    assert export(first.parent, target)[0] == 0
    target.unlink()
    if not index:
        next(first.parent.glob("*.index.json")).unlink()
    for shard in (second, first):
        shard.unlink(missing_ok=True)
        code, text = export(first.parent, target)
        assert code == 1
        assert f"lacks {shard.name}" in text or "holds no model" in text
        assert not target.exists()
        save_shards(tmp_path / f"again {shard.stem}", **kind)
        shard.write_bytes((tmp_path / f"again {shard.stem}" / shard.name).read_bytes())


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a", "c"), "lacks the weight b that"), (("a", "a"), "holds a, and so does another shard")],
    ids=["another weight", "the same weight"],
)
@pytest.mark.parametrize("kind", SHARDS.values(), ids=SHARDS)
def test_shards_that_are_not_of_one_save_are_refused(tmp_path, target, kind, names, said):
    first, _ = save_shards(tmp_path / "saved", names=names, **kind)
    code, text = export(first.parent, target)
    assert (code, target.exists()) == (1, False)
    assert said in text


def test_shards_in_both_formats_are_two_models(tmp_path, target):
    first, _ = save_shards(tmp_path / "saved", **SHARDS["safetensors"])
    other, _ = save_shards(tmp_path / "other", **SHARDS["torch.save"])
    (first.parent / other.name).write_bytes(other.read_bytes())
    assert "holds several models: export" in export(first.parent, target)[1]


@pytest.mark.parametrize("prefix", ["", "net."])
def test_two_weights_that_would_get_one_name_are_refused(tmp_path, target, prefix):
    state = {f"{prefix}w": torch.ones(2), f"{prefix}_orig_mod.w": torch.zeros(2)}
    torch.save(state, tmp_path / "a.pt")
    code, text = export(tmp_path / "a.pt", target, "--prefix", prefix)
    assert (code, target.exists()) == (1, False)
    assert f"'{prefix}w' and '{prefix}_orig_mod.w' are both called 'w'" in text.replace(
        f"'{prefix}w' without", "'w' without"
    )
    state[f"{prefix}_orig_mod.w"] = torch.ones(2)
    torch.save(state, tmp_path / "a.pt")
    export_same(tmp_path / "a.pt", target, {"w": torch.ones(2)}, "--prefix", prefix)


def test_only_a_whole_part_of_a_name_is_dropped(tmp_path, target):
    state = {"my_orig_mod.w": torch.ones(2), "my": torch.zeros(2)}
    torch.save(state, tmp_path / "a.pt")
    export_same(tmp_path / "a.pt", target, state)


LARGEST = torch.finfo(torch.float32).max
TOO_LARGE = [
    ("fp16", 1e6, "--dtype bf16 or fp32"),
    ("bf16", -LARGEST, "--dtype fp32"),
    ("fp16", -1e300, "--dtype bf16"),
]


@pytest.mark.parametrize(("dtype", "value", "way_out"), TOO_LARGE)
def test_a_number_that_would_become_infinite_is_refused(tmp_path, target, dtype, value, way_out):
    target.write_text("of before")
    torch.save(
        {"net.w": torch.tensor([1.0, value], dtype=torch.float64 if abs(value) > LARGEST else None)},
        tmp_path / "a.pt",
    )
    code, text = export(tmp_path / "a.pt", target, "--dtype", dtype, "--force")
    assert code == 1
    assert f"net.w (up to {abs(value):.3g}) would be infinite in {dtype}" in text
    assert way_out in text
    assert target.read_text() == "of before"
    assert [file.name for file in tmp_path.iterdir() if "tmp" in file.name] == []


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_8_bits_are_converted_exactly(tmp_path, target, stored, dtype):
    weight = torch.tensor([0.5, -448.0, 1.0]).to(stored)
    torch.save({"weight": weight}, tmp_path / "a.pt")
    export_same(tmp_path / "a.pt", target, {"weight": weight.to(DTYPES[dtype])}, "--dtype", dtype)


def test_infinities_and_nan_that_are_there_are_written(tmp_path, target):
    state = {"mask": torch.tensor([0.0, -float("inf")]), "w": torch.tensor([float("nan")])}
    torch.save(state, tmp_path / "a.pt")
    code, _ = export(tmp_path / "a.pt", target, "--dtype", "fp16")
    assert code == 0
    assert load_file(target)["mask"].tolist() == [0.0, -float("inf")]


def save_old(state, file):
    torch.save(state, file, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("trust", [[], ["--trust"]], ids=["", "trusted"])
@pytest.mark.parametrize(
    ("name", "write"),
    [("a.pt", torch.save), ("a.bin", save_old), ("a.safetensors", save_file)],
    ids=lambda given: str(given)[:12],
)
def test_a_file_that_was_cut_short_is_refused(tmp_path, target, name, write, share, trust):
    file = tmp_path / name
    write({"w": torch.ones(100, 100)}, file)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    code, text = export(file, target, *trust)
    assert (code, target.exists()) == (1, False)
    assert f"{name} cannot be read (" in text
    assert "if it was cut short, copy or save it again" in text


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


def test_shards_and_their_index_load_as_transformers_loads_them(tmp_path, target):
    """transformers can load the folder, and an export of the folder has the same bits as the model."""
    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    torch.manual_seed(0)
    model = BertModel(config)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    folder = tmp_path / "shards"
    code, said = export(tmp_path / "a.pt", folder, "--max-shard-size", "20KB")
    assert code == 0, said
    files = sorted(file.name for file in folder.iterdir())
    assert files[-1] == "model.safetensors.index.json"
    assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    assert len(files) > 3
    index = json.loads((folder / files[-1]).read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    config.save_pretrained(folder)
    loaded = BertModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    (folder / "config.json").unlink()
    export_same(folder, target, model.state_dict())
    assert "give another name" in export(tmp_path / "a.pt", folder, "--max-shard-size", "20KB", "--force")[1]


def test_a_model_that_fits_is_one_shard_without_an_index(tmp_path):
    torch.save(tied().state_dict(), tmp_path / "a.pt")
    code, said = export(tmp_path / "a.pt", tmp_path / "shards", "--max-shard-size", "5GB")
    assert code == 0, said
    assert [file.name for file in (tmp_path / "shards").iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "shards" / "model.safetensors").keys() == tied().state_dict().keys()


def test_a_size_that_cannot_be_read_leaves_nothing(tmp_path):
    torch.save(tied().state_dict(), tmp_path / "a.pt")
    code, said = export(tmp_path / "a.pt", tmp_path / "shards", "--max-shard-size", "many")
    assert code == 1
    assert "many" in said
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
