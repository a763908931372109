"""Exports the model in a checkpoint of Lightning, Accelerate or a plain training loop as safetensors."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from amp_plugin.messages import did_you_mean
from amp_plugin.precision import DTYPES
from amp_plugin.weights.formats import FORMATS, HALVES

_ENTRY_OF_0_2: Final = "amp_plugin_weights"
# The keys under which Lightning and plain training loops save state dicts.
_KEYS: Final = ("state_dict", "model", "model_state_dict")
_SHARD: Final = re.compile(r"(?P<model>.+)-(?P<number>\d+)-of-(?P<count>\d+)")
_ADDED_BY_COMPILE: Final = re.compile(r"(^|\.)_orig_mod\.")
# Error messages list at most this many weights.
_NAMED_AT_MOST: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Counts of what an export has written."""

    tensors: int
    elements: int  # the number of elements in these tensors
    size: int  # the bytes of all files
    # The number of 16-bit weights that were joined with remainders (low-order bits) from release 0.2.
    restored: int
    left_out: tuple[str, ...]  # names of entries that are not tensors


def export(
    source: Path,
    target: Path,
    *,
    dtype: str = "fp32",
    prefix: str = "",
    key: str = "",
    trust: bool = False,
    max_shard_size: str = "",
) -> Exported:
    """Write the weights of a checkpoint to a safetensors file.

    - Read a Lightning checkpoint, a folder that Accelerate or transformers saved, or a ``torch.save`` file.
    - Join 16-bit weights with their other bits (remainders), which release 0.2 saved in optimizer states.
    - From all names, remove ``prefix`` and the parts that torch.compile adds.
    - Check that all shards exist, that no two weights get the same name, and that no finite number becomes
      infinite.
    - Write floating-point tensors in ``dtype``. Tensors of other dtypes are written unchanged. With
      ``dtype="fp32"``, float64 tensors also stay unchanged.

    The target is written only if all checks pass.

    Args:
        source: The checkpoint, a file or a folder.
        target: The file to write. If ``max_shard_size`` is given, ``target`` is a new folder for the shards
            and their index.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        prefix: Only weights whose names begin with this string are written. It is removed from their names.
        key: The key of the state dict in a ``torch.save`` file.
        trust: If True, arbitrary objects are unpickled, so Python code in the file can run.
        max_shard_size: The largest size of a shard, such as ``"5GB"``. If ``max_shard_size`` is empty, a
            single file is written.

    Raises:
        FileNotFoundError, ValueError: The checkpoint is damaged or of an unknown kind.
        ImportError: ``max_shard_size`` is given, but huggingface_hub is not installed.
    """
    weights, optimizers = _read(source, key, trust=trust)
    named = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    restored = _restore(named, optimizers)
    chosen = _named(named, prefix)
    made = {name: _in_dtype(value, dtype) for name, value in chosen.items()}
    _require_finite(chosen, made, dtype)
    if max_shard_size:
        _write_shards(made, target, max_shard_size)
    else:
        _write_file(made, target)
    return Exported(
        tensors=len(made),
        elements=sum(value.numel() for value in made.values()),
        size=sum(file.stat().st_size for file in ([target] if target.is_file() else target.iterdir())),
        restored=restored,
        left_out=tuple(name for name in weights if name not in named),
    )


# -- reading ---------------------------


def _read(source: Path, key: str, *, trust: bool) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the state dict of a checkpoint's model, and the state dicts of its optimizers."""
    if source.is_dir():
        return _read_folder(source, trust=trust)
    if not source.is_file():
        msg = f"checkpoint {str(source)!r} does not exist"
        raise FileNotFoundError(msg)
    saved, names = _load(source, trust=trust), (key,) if key else _KEYS
    found = next((saved[name] for name in names if _is_state_dict(saved.get(name))), None)
    if found is None and not key and _is_state_dict(saved):
        found = saved
    if found is None:
        held = ", ".join(map(repr, saved)) or "nothing"
        hint = did_you_mean(key, saved) if key else ""
        msg = f"{source} holds no state dict under {', '.join(names)}; give --key, one of {held}{hint}"
        raise ValueError(msg)
    return found, saved.get("optimizer_states", ())


def _read_folder(folder: Path, *, trust: bool) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    if (folder / ".metadata").is_file():
        msg = (
            f"{folder} is a sharded checkpoint: run python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {folder} whole.pt, and export whole.pt"
        )
        raise ValueError(msg)
    files = _files_of_one_model(folder)
    weights: dict[str, Any] = {}
    for file in files:
        held = _load(file, trust=trust)
        if twice := sorted(held.keys() & weights.keys()):
            msg = f"{file} holds {_listed(twice)}, and so does another shard; save the checkpoint again"
            raise ValueError(msg)
        weights |= held
    _require_all_of_index(folder, files, weights)
    return weights, [_load(file, trust=trust) for file in sorted(folder.glob("optimizer*.bin"))]


def _files_of_one_model(folder: Path) -> list[Path]:
    """Return the file of a model, or the files of all its shards."""
    files = sorted([*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if not files:
        msg = f"{folder} holds no model.safetensors and no pytorch_model.bin; give the file itself"
        raise FileNotFoundError(msg)
    models = {_SHARD.sub(r"\g<model> of \g<count>", file.stem) + file.suffix for file in files}
    if len(models) > 1:
        msg = f"{folder} holds several models: export {' or '.join(map(str, files))}"
        raise ValueError(msg)
    if shard := _SHARD.fullmatch(files[0].stem):
        numbers = range(1, int(shard["count"]) + 1)
        names = [
            f"{shard['model']}-{number:0{len(shard['number'])}}-of-{shard['count']}{files[0].suffix}"
            for number in numbers
        ]
        _require_files(folder, names)
    return files


def _require_files(folder: Path, names: Sequence[str]) -> None:
    if missing := [name for name in names if not (folder / name).is_file()]:
        msg = f"{folder} lacks {_listed(missing)}, a part of the model; copy or download it again"
        raise FileNotFoundError(msg)


def _require_all_of_index(folder: Path, files: Sequence[Path], weights: Mapping[str, Any]) -> None:
    """Check that the files contain every weight that the index lists.

    Transformers and Accelerate write an index if they save a model as several files.
    """
    shard = _SHARD.fullmatch(files[0].stem)
    index = folder / f"{shard['model']}{files[0].suffix}.index.json" if shard else None
    if index is None or not index.is_file():
        return
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    _require_files(folder, sorted({*places.values()}))
    if missing := [name for name in places if name not in weights]:
        msg = f"{folder} lacks the weight {_listed(missing)} that {index.name} lists; save the model again"
        raise ValueError(msg)


def _load(file: Path, *, trust: bool) -> dict[str, Any]:
    from safetensors import SafetensorError  # noqa: PLC0415 - for this command only
    from safetensors.torch import load_file  # noqa: PLC0415

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        saved = torch.load(file, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        why = str(error).strip().splitlines()
        line = next((line.strip() for line in why if "GLOBAL" in line), why[0])
        msg = f"{file} holds more than tensors and plain data ({line}); if you trust its author, give --trust"
        raise ValueError(msg) from error
    except (EOFError, OSError, RuntimeError, SafetensorError) as error:
        why = str(error).strip().splitlines() or ["it ends too early"]
        msg = f"{file} cannot be read ({why[0]}); if it was cut short, copy or save it again"
        raise ValueError(msg) from error
    if not isinstance(saved, dict):
        msg = f"{file} holds a {type(saved).__name__}, not a dict; save model.state_dict() and export that"
        raise ValueError(msg)  # noqa: TRY004 - the file's content is wrong, not a type
    return saved


def _is_state_dict(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(entry, Tensor) for entry in value.values())


# -- writing ---------------------------


def _restore(named: dict[str, Tensor], optimizers: Sequence[Mapping[str, Any]]) -> int:
    """Join 16-bit weights with the remainders from optimizer states of release 0.2. Return the weight count.

    A remainder holds the bits of a float32 weight that the 16-bit weight lacks. Release 0.2 numbered the
    remainders of the weights in the order of the optimizer's parameters. The first remainder belongs to the
    model's first 16-bit weight, and so on. If the shapes do not match, a ValueError is raised.
    """
    kept = [optimizer.get(_ENTRY_OF_0_2, {}).get("rests", {}) for optimizer in optimizers]
    rests = [rest for numbered in kept for _, rest in sorted(numbered.items())]
    stored = [name for name, value in named.items() if value.dtype in HALVES]
    if rests and [named[name].shape for name in stored] != [rest.shape for rest in rests]:
        msg = (
            f"the optimizers hold the remainders of {len(rests)} weights by number, but the "
            f"{len(stored)} weights in 16 bits do not match them: load the checkpoint in the program "
            "that wrote it and save it again; this release saves float32"
        )
        raise ValueError(msg)
    for name, rest in zip(stored, rests, strict=False):
        form = "fp16" if rest.dtype is torch.float32 else "bf16"
        named[name] = FORMATS[form].join([named[name]], [rest])[0]
    return len(rests)


@torch.no_grad()
def load_entry_of_0_2(params: list[Tensor], state_dict: Mapping[str, Any]) -> None:
    """Add to loaded weights the bits (remainders) that release 0.2 saved in an optimizer's state dict."""
    for number, saved in state_dict.get(_ENTRY_OF_0_2, {}).get("rests", {}).items():
        param = params[number]
        if param.dtype is torch.float32 and saved.shape == param.shape:
            form = FORMATS["fp16" if saved.dtype is torch.float32 else "bf16"]
            half = param.to(form.dtype)
            (whole,) = form.join([half], [saved.to(param.device, copy=True)])
            param.copy_(torch.where(half.float() == param, whole, param))


def _named(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    chosen = [name for name in named if name.startswith(prefix)]
    if not chosen:
        msg = f"no weight's name begins with {prefix!r}; the names are {', '.join(list(named)[:3])}, ..."
        raise ValueError(msg)
    # Maps each name in the written file to the name in the checkpoint.
    made: dict[str, str] = {}
    for name in chosen:
        short = _ADDED_BY_COMPILE.sub(r"\1", name.removeprefix(prefix))
        other = made.setdefault(short, name)
        if other != name and not _are_equal(named[other], named[name]):
            msg = (
                f"{other!r} and {name!r} are both called {short!r} without the prefix of torch.compile, and "
                "differ; give --prefix to take one, or delete the other from the checkpoint"
            )
            raise ValueError(msg)
    return {short: named[name] for short, name in made.items()}


def _write_file(made: Mapping[str, Tensor], target: Path) -> None:
    """Write one safetensors file, which has a temporary name until it is complete."""
    from safetensors.torch import save_file  # noqa: PLC0415 - for this command only

    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        save_file(dict(made), unfinished, metadata={"format": "pt"})
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_shards(made: Mapping[str, Tensor], folder: Path, max_shard_size: str) -> None:
    """Write shards and their index in the file layout of transformers.

    The folder has a temporary name until all files are complete.
    """
    from huggingface_hub import split_torch_state_dict_into_shards  # noqa: PLC0415 - of an extra

    split = split_torch_state_dict_into_shards(dict(made), max_shard_size=max_shard_size)
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for file, names in split.filename_to_tensors.items():
            _write_file({name: made[name] for name in names}, unfinished / file)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True)
            (unfinished / "model.safetensors.index.json").write_text(f"{text}\n", encoding="utf-8")
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def _require_finite(chosen: Mapping[str, Tensor], made: Mapping[str, Tensor], dtype: str) -> None:
    """Raise ValueError if a finite number would become infinite in ``dtype``."""
    beyond = [
        f"{name} (up to {chosen[name].abs().max():.3g})"
        for name, value in made.items()
        if value.is_floating_point()
        and chosen[name].dtype.itemsize
        > 1  # values of 8-bit floats fit into every dtype, and torch has no isinf for 8-bit floats
        and value.isinf().ne(chosen[name].isinf()).any()
    ]
    if beyond:
        others = "fp32" if dtype == "bf16" else "bf16 or fp32"
        msg = f"{_listed(beyond)} would be infinite in {dtype}; give --dtype {others}"
        raise ValueError(msg)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _in_dtype(value: Tensor, dtype: str) -> Tensor:
    """Return a copy of a tensor in ``dtype``. Tied weights are copied once for each name."""
    keeps = not value.is_floating_point() or (dtype == "fp32" and value.dtype is torch.float64)
    wanted = value if keeps else value.to(DTYPES[dtype])
    return wanted.detach().clone(memory_format=torch.contiguous_format)
