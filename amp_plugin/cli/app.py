"""The command `amp-plugin`: its commands, of which two are here: check a machine, compile ahead.

Exit codes: 0 all is well, 1 something is missing or failed, 2 the command line or an environment
variable is wrong. With ``--json`` standard output is one JSON object and nothing else.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import typer

import amp_plugin
from amp_plugin.cli import export, numerics, rules, run, tune
from amp_plugin.cli.arguments import OF_SCRIPTS, AsJson, Device, fail

app = typer.Typer(
    name="amp-plugin",
    help="Automatic mixed precision for PyTorch, Lightning and Accelerate.",
    no_args_is_help=True,
    add_completion=False,
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
        Literal["fp16", "bf16", "fp32"], typer.Option(help="Precision to plan for.")
    ] = "fp16",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has, what is compiled or why not, and what a run in a precision would do."""
    from amp_plugin.cli.doctor import default_device, examine, print_report  # noqa: PLC0415 - loads torch

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
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Compile even what the cache has.")] = False,
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
    """Compile the native core ahead of its first use, for instance into a machine image."""
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


app.command()(export.export)
app.command(context_settings=OF_SCRIPTS)(run.casts)
app.command(context_settings=OF_SCRIPTS)(run.run)
app.command(context_settings=OF_SCRIPTS)(numerics.diagnose)
app.command()(numerics.compare)
app.command(context_settings=OF_SCRIPTS)(run.report)
app.command(context_settings=OF_SCRIPTS)(tune.tune)
app.add_typer(rules.commands)
