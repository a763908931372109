"""Define the command `amp-plugin`, and its subcommands `doctor`, `build` and `export`.

The exit code is 0 on success, and 1 if something is missing or has failed. The exit code is 2 if the command
line or an environment variable is wrong. With ``--json``, a command prints one JSON object to standard output
and nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

import amp_plugin
from amp_plugin.cli import check, gap, numerics, rules, run
from amp_plugin.cli.arguments import AsJson, Device, ScriptCommand, fail

app = typer.Typer(
    name="amp-plugin",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(amp_plugin.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Automatic mixed precision for PyTorch, Lightning and Accelerate."""


@app.command()
def doctor(
    precision: Annotated[
        Literal["fp16", "bf16", "fp32", "auto"] | None,
        typer.Option(help="Precision to plan for. Default: fp16."),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show the devices, the state of the native core, and what a run in this precision would do."""
    from amp_plugin.cli.doctor import examine, print_report  # noqa: PLC0415 - loads torch
    from amp_plugin.hardware import default_device  # noqa: PLC0415 - loads torch

    try:
        report = examine(precision, device or default_device())
    except ValueError as error:
        fail(str(error), code=2)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    raise typer.Exit(0 if report["healthy"] else 1)


def _check_architectures(given: list[str] | None) -> list[str] | None:
    for name in given or []:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            msg = f"{name!r} is not a GPU architecture; give it as sm_90, as `amp-plugin doctor` does"
            raise typer.BadParameter(msg)
    return given


@app.command()
def build(
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Compile again what the cache already has.")
    ] = False,
    cuda: Annotated[
        list[str] | None,
        typer.Option(
            "--cuda",
            metavar="ARCH",
            callback=_check_architectures,
            help="Compile the CUDA kernels too, for sm_90 and so on; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the native core before its first use, for example when a machine image is built."""
    from amp_plugin.kernels.build import build_core  # noqa: PLC0415 - loads torch

    try:
        core, seconds = build_core(rebuild=rebuild)
        cubins = _build_cuda(cuda) if cuda else 0
    except (OSError, RuntimeError, ValueError) as error:
        if as_json:
            print(json.dumps({"built": False, "reason": str(error)}))
        fail(str(error), code=1)
    if as_json:
        count = {"cubins": cubins} if cuda else {}
        print(json.dumps({"built": True, "core": str(core), **count, "seconds": round(seconds, 1)}))
    else:
        state = f"compiled in {seconds:.1f} s" if seconds else "already compiled"
        print(f"{state}: {core}")
        if cuda:
            print(f"{cubins} CUDA kernels for {', '.join(cuda)} are in the cache")


def _build_cuda(architectures: list[str]) -> int:
    from amp_plugin.kernels.cuda.register import PACKAGES  # noqa: PLC0415 - loads torch

    try:
        from amp_plugin.kernels.cuda.compile import build_ahead  # noqa: PLC0415 - needs cuda-core
    except ImportError as error:
        msg = f"the CUDA kernels cannot be compiled: {error}; run: pip install {PACKAGES}"
        raise RuntimeError(msg) from error
    return build_ahead(architectures)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A file, or a folder of Accelerate or transformers.")],
    target: Annotated[
        Path, typer.Argument(help="The file to write, *.safetensors; with --max-shard-size, a new folder.")
    ],
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Dtype of the weights.")] = "fp32",
    prefix: Annotated[
        str, typer.Option(help="Take only the names that begin with this text, and remove it: model.")
    ] = "",
    key: Annotated[
        str, typer.Option(help="The key under which a file of torch.save holds the state dict.")
    ] = "",
    max_shard_size: Annotated[
        str,
        typer.Option(
            help="Write shards of at most this size, such as 5GB, and their index. Default: one file."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Unpickle any object. Code in the file can then run here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as safetensors, in exact float32 or rounded to 16 bits.

    The command reads checkpoints of Lightning, Accelerate, transformers and torch.save. For weights that were
    stored in 16 bits with a remainder, the exact float32 values are written.

    Load the result with model.load_state_dict(safetensors.torch.load_file(...)).
    """
    from amp_plugin.weights.export import export as write  # noqa: PLC0415 - loads torch

    if target.suffix != ".safetensors" and not max_shard_size:
        fail(f"{str(target)!r} must end in .safetensors; name it {target.stem}.safetensors", code=2)
    if target.exists() and max_shard_size:
        fail(f"{str(target)!r} exists; shards are written into a new folder, so give another name", code=2)
    if target.exists() and not force:
        fail(f"{str(target)!r} exists; give another name, or --force to write over it", code=2)
    try:
        done = write(
            checkpoint,
            target,
            dtype=dtype,
            prefix=prefix,
            key=key,
            trust=trust,
            max_shard_size=max_shard_size,
        )
    except (OSError, ValueError, ImportError) as error:
        fail(str(error), code=1)
    if as_json:
        print(json.dumps({"file": str(target), "dtype": dtype, **asdict(done)}))
        return
    size = f"{done.size / 1e6:.1f} MB" if done.size >= 1e5 else f"{done.size:,} bytes"
    print(f"{target}: {done.tensors} tensors, {done.elements:,} elements in {dtype}, {size}")
    if done.restored:
        print(
            f"{done.restored} weights that amp_plugin 0.2 had stored in 16 bits are exact, because the "
            "checkpoint also has their lower 16 bits"
        )
    if done.left_out:
        print(f"left out, because they are not tensors: {', '.join(done.left_out)}")


app.command()(check.check)
app.command(cls=ScriptCommand)(run.casts)
app.command(cls=ScriptCommand)(run.run)
app.command(cls=ScriptCommand)(numerics.diagnose)
app.command()(numerics.compare)
app.command(cls=ScriptCommand)(run.report)
app.command(cls=ScriptCommand)(rules.tune)
app.command(cls=ScriptCommand)(gap.gap)
app.add_typer(rules.commands)
