"""A model out of a checkpoint of Lightning, Accelerate or a plain loop, as one safetensors file."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from amp_plugin.messages import did_you_mean
from amp_plugin.precision import DTYPES
from amp_plugin.weights.weight import FORMATS, HALVES

_ENTRY_OF_0_2: Final = "amp_plugin_weights"
_KEYS: Final = ("state_dict", "model", "model_state_dict")  # of Lightning, and of plain loops
_SHARD: Final = re.compile(r"(?P<model>.+)-(?P<number>\d+)-of-(?P<count>\d+)")
_ADDED_BY_COMPILE: Final = re.compile(r"(^|\.)_orig_mod\.")
_NAMED_AT_MOST: Final = 3  # weights in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    tensors: int
    elements: int  # numbers in them
    size: int  # of the file in bytes
    restored: int  # weights whose low halves came from the optimizer's state, as 0.2 saved them
    left_out: tuple[str, ...]  # entries that are not tensors


def export(
    source: Path, target: Path, *, dtype: str = "fp32", prefix: str = "", key: str = "", trust: bool = False
) -> Exported:
    """Write the weights of a checkpoint as safetensors, each under its name and once.

    ::

        read     a Lightning file, a folder of Accelerate or transformers, a file of torch.save
        widen    16 bits and what 0.2 kept of them in the optimizer's state make the float32 number
        name     drop the prefix and what torch.compile adds
        check    all shards are there, no two weights get one name, no number becomes infinite
    write    floating-point tensors in the dtype; others, and float64 in fp32, as they are

    The command ``amp-plugin export`` tells what the arguments are; a FileNotFoundError or ValueError, what is
    wrong with the checkpoint. The target is written only if all is well.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - for this command only

    weights, optimizers = _read(source, key, trust=trust)
    named = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    restored = _restore(named, optimizers)
    chosen = _named(named, prefix)
    made = {name: _in_dtype(value, dtype) for name, value in chosen.items()}
    _require_finite(chosen, made, dtype)
    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        save_file(made, unfinished, metadata={"format": "pt"})
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return Exported(
        tensors=len(made),
        elements=sum(value.numel() for value in made.values()),
        size=target.stat().st_size,
        restored=restored,
        left_out=tuple(name for name in weights if name not in named),
    )


# -- reading -------------------------------------------------------------------------------------------


def _read(source: Path, key: str, *, trust: bool) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return a state dict, and the state dicts of the optimizers next to it."""
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
    """Return the one file of a model, or all its shards."""
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
    """Compare the weights with the index that transformers and Accelerate write next to shards."""
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


# -- what is written -----------------------------------------------------------------------------------


def _restore(named: dict[str, Tensor], optimizers: Sequence[Mapping[str, Any]]) -> int:
    """Make float32 of the weights of which 0.2 kept something in the optimizers' state; return how many.

    It numbered the parameters of an optimizer: the model's weights in 16 bits, in order, as shapes confirm.
    """
    kept = [optimizer.get(_ENTRY_OF_0_2, {}).get("rests", {}) for optimizer in optimizers]
    rests = [rest for numbered in kept for _, rest in sorted(numbered.items())]
    stored = [name for name, value in named.items() if value.dtype in HALVES]
    if rests and [named[name].shape for name in stored] != [rest.shape for rest in rests]:
        msg = (
            f"the optimizers keep the low halves of {len(rests)} weights by number, and the {len(stored)} "
            "weights in 16 bits do not match them: load the checkpoint in the program that wrote it and save "
            "it again, this release saves float32"
        )
        raise ValueError(msg)
    for name, rest in zip(stored, rests, strict=False):
        form = "fp16" if rest.dtype is torch.float32 else "bf16"
        named[name] = FORMATS[form].join([named[name]], [rest])[0]
    return len(rests)


@torch.no_grad()
def load_entry_of_0_2(params: list[Tensor], state_dict: Mapping[str, Any]) -> None:
    """Add what an optimizer's checkpoint of 0.2 kept to the loaded weights that are those that were saved."""
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
    made: dict[str, str] = {}  # name that is written -> name in the checkpoint
    for name in chosen:
        short = _ADDED_BY_COMPILE.sub(r"\1", name.removeprefix(prefix))
        other = made.setdefault(short, name)
        if other != name and not _are_equal(named[other], named[name]):
            msg = (
                f"{other!r} and {name!r} are both {short!r} without what torch.compile adds, and differ; "
                "give --prefix to take one, or delete the other from the checkpoint"
            )
            raise ValueError(msg)
    return {short: named[name] for short, name in made.items()}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def _require_finite(chosen: Mapping[str, Tensor], made: Mapping[str, Tensor], dtype: str) -> None:
    """Refuse to write an infinity for a finite number."""
    beyond = [
        f"{name} (up to {chosen[name].abs().max():.3g})"
        for name, value in made.items()
        if value.is_floating_point() and value.isinf().ne(chosen[name].isinf()).any()
    ]
    if beyond:
        others = "fp32" if dtype == "bf16" else "bf16 or fp32"
        msg = f"{_listed(beyond)} would be infinite in {dtype}; give --dtype {others}"
        raise ValueError(msg)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _in_dtype(value: Tensor, dtype: str) -> Tensor:
    """Return a tensor of its own memory: tied weights are written under each name."""
    keeps = not value.is_floating_point() or (dtype == "fp32" and value.dtype is torch.float64)
    wanted = value if keeps else value.to(DTYPES[dtype])
    return wanted.detach().clone(memory_format=torch.contiguous_format)
