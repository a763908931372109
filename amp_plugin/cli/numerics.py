"""Define the commands `amp-plugin diagnose` and `amp-plugin compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from amp_plugin.cli.arguments import Arguments, AsJson, AsModule, Script, fail, program_of, run_script, show
from amp_plugin.program import Program

if TYPE_CHECKING:
    from amp_plugin.numerics.finding import Finding


def diagnose(
    script: Script,
    arguments: Arguments = None,
    as_module: AsModule = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="List every origin of nans and infs, not only the first.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Report every nan and inf, even if it is harmless.")
    ] = False,
    compare: Annotated[
        Literal["fp32", "fp64", "eager"] | None,
        typer.Option(help="fp32, fp64: measure each op's error. eager: compare compiled with eager code."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Record the result of each op in this file (with several ranks, in this folder), for "
            "`compare`."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="The number of optimizer steps to record, with --save.")
    ] = 10,
    rows: Annotated[int, typer.Option(min=1, help="The number of rows of the table of errors.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Run a script and name the first op that produces a harmful nan or inf.

    A nan or inf is harmful if it reaches a loss, a gradient or a weight. The exit code is 1 if there is one.
    """
    program = program_of(script, as_module=as_module)
    if compare and (keep_going or strict or save):
        fail("--compare measures errors; leave --keep-going, --strict and --save out", code=2)
    if save and (keep_going or strict):
        fail("--save records a run; leave --keep-going and --strict out", code=2)
    if compare or save:
        _measure(program, arguments, compare or "", save, steps, rows, as_json)
    else:
        _find_non_finite(program, arguments, keep_going, strict, as_json)


def _find_non_finite(
    program: Program, arguments: list[str] | None, keep_going: bool, strict: bool, as_json: bool
) -> None:
    from amp_plugin.numerics.diagnose import Diagnosis  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.finding import NonFiniteError  # noqa: PLC0415 - loads torch
    from amp_plugin.scaling.ranks import rank_of_process  # noqa: PLC0415

    def tell_at_once(finding: Finding) -> None:
        """Print a rank's result immediately, because a launcher ends all ranks when one rank exits."""
        if finding.rank is not None and not as_json:
            _print_finding(finding)

    diagnosis = Diagnosis(keep_going=keep_going, strict=strict, on_finding=tell_at_once)
    code, failed = run_script(program, arguments, diagnosis, as_json=as_json, expected=NonFiniteError)
    if as_json:
        findings = [finding.to_dict() for finding in diagnosis.findings]
        read = [finding.to_dict() for finding in diagnosis.read]
        print(json.dumps({"script": program.name, "exit_code": code, "findings": findings, "read": read}))
    elif diagnosis.findings:
        for finding in diagnosis.findings:
            if finding.rank is None:
                _print_finding(finding)
    elif not failed:
        print(diagnosis.report())
    elif notes := diagnosis.notes():
        print("\n".join(["before this error, no nan or inf reached a loss, a gradient or a weight", *notes]))
    elif (rank := rank_of_process()) is not None:
        print(
            f"rank {rank} found nothing before the error above. If another rank has stopped, that is the "
            "reason for this error, and the report of that rank names the op",
            file=sys.stderr,
        )
    raise typer.Exit(1 if diagnosis.findings else code)


def _print_finding(finding: Finding) -> None:
    headline, _, rest = str(finding).partition("\n")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"\n[bold red]{escape(headline)}[/]\n{escape(rest)}")


def _measure(
    program: Program,
    arguments: list[str] | None,
    than: str,
    file: Path | None,
    steps: int,
    rows: int,
    as_json: bool,
) -> None:
    """Run a program to record its ops, or to compare their results with a wider dtype or eager mode."""
    import torch  # noqa: PLC0415 - takes seconds

    from amp_plugin.numerics.compiled import CompiledComparison  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.run_recorder import RunRecorder  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.shadow import ShadowRun  # noqa: PLC0415 - loads torch

    region: RunRecorder | CompiledComparison | ShadowRun
    if file is not None:
        region = RunRecorder(file, steps=steps)
    elif than == "eager":
        region = CompiledComparison()
    else:
        region = ShadowRun(dtype=torch.float32 if than == "fp32" else torch.float64)
    code, _ = run_script(program, arguments, region, as_json=as_json)
    if as_json:
        print(json.dumps({"script": program.name, "exit_code": code, **region.to_dict()}))
    elif isinstance(region, ShadowRun):
        show(region.table(rows))
    else:
        print(region.report())
    raise typer.Exit(1 if isinstance(region, CompiledComparison) and region.differences else code)


def compare(
    first: Annotated[Path, typer.Argument(exists=True, help="A recording by diagnose --save.")],
    second: Annotated[
        Path,
        typer.Argument(
            exists=True,
            help="Another recording. It has the same number of ranks, or one of the two is of one process.",
        ),
    ],
    names: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A YAML file that maps module names of the first run to those of the second.",
        ),
    ] = None,
    layouts: Annotated[
        bool,
        typer.Option(
            "--layouts", help="If both runs have one process: combine the micro-batches of the second run."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Name the first result in which two recorded runs differ.

    A run of one process can be compared with a run on several ranks. The shards, partial sums and replicas of
    all ranks are combined before the comparison.

    The exit code is 1 if the runs differ by more than rounding, or if ranks of one run differ where they must
    agree. The exit code is also 1 if the recording of a rank is missing or incomplete.
    """
    from amp_plugin.numerics.compare import compare_runs  # noqa: PLC0415 - loads torch
    from amp_plugin.numerics.module_names import read_names  # noqa: PLC0415

    try:
        known = None if names is None else read_names(names)
        comparison = compare_runs(first, second, names=known, layouts=layouts)
    except (ImportError, OSError, ValueError) as error:
        fail(str(error), code=2)
    print(json.dumps(comparison.to_dict()) if as_json else comparison.report())
    raise typer.Exit(0 if comparison.is_clean else 1)
