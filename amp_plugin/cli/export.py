"""`amp-plugin export`: the model of a checkpoint as a safetensors file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from amp_plugin.cli.arguments import AsJson, fail


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A file, or a folder of Accelerate or transformers.")],
    target: Annotated[Path, typer.Argument(help="The file to write, *.safetensors.")],
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Dtype of the weights.")] = "fp32",
    prefix: Annotated[str, typer.Option(help="Take only names that begin so, and drop it: model.")] = "",
    key: Annotated[str, typer.Option(help="Where a file of torch.save holds the state dict.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle any object; whoever wrote the file can run code here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as safetensors: exact float32, or rounded to 16 bits.

    Checkpoints of Lightning, Accelerate, transformers and torch.save, and those of 0.2 whose weights were
    stored in 16 bits. It loads anywhere: model.load_state_dict(safetensors.torch.load_file(...)).
    """
    from amp_plugin.weights.export import export as write  # noqa: PLC0415 - loads torch

    if target.suffix != ".safetensors":
        fail(f"{str(target)!r} is not named as what is written; name it {target.stem}.safetensors", code=2)
    if target.exists() and not force:
        fail(f"{str(target)!r} exists; give another name, or --force to write over it", code=2)
    try:
        done = write(checkpoint, target, dtype=dtype, prefix=prefix, key=key, trust=trust)
    except (OSError, ValueError, ImportError) as error:
        fail(str(error), code=1)
    if as_json:
        print(json.dumps({"file": str(target), "dtype": dtype, **asdict(done)}))
        return
    size = f"{done.size / 1e6:.1f} MB" if done.size >= 1e5 else f"{done.size:,} bytes"
    print(f"{target}: {done.tensors} tensors, {done.elements:,} numbers in {dtype}, {size}")
    if done.restored:
        print(f"{done.restored} weights that 0.2 stored in 16 bits are exact: their low halves were found")
    if done.left_out:
        print(f"left out, not tensors: {', '.join(done.left_out)}")
