"""The commands about numbers: `amp-plugin diagnose`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

Script = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python file to run.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def diagnose(
    script: Script,
    arguments: Arguments = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="List every origin, not the first alone.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Report an infinity even if nothing comes of it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a script and name the first op that makes a nan or a harmful infinity; exit code 1 if one does."""
    from amp_plugin.numerics.script_diagnosis import diagnosed  # noqa: PLC0415 - loads torch

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        diagnosis, run = diagnosed(script, arguments or [], keep_going=keep_going, strict=strict)
    if as_json:
        findings = [finding.to_dict() for finding in diagnosis.findings]
        print(json.dumps({"script": str(script), "exit_code": run.code, "findings": findings}))
    elif diagnosis.findings:
        console = Console(highlight=False, soft_wrap=True)
        for finding in diagnosis.findings:
            headline, _, rest = str(finding).partition("\n")
            console.print(f"\n[bold red]{escape(headline)}[/]\n{escape(rest)}")
    elif not run.failed:
        print(diagnosis.report())
    raise typer.Exit(1 if diagnosis.findings else run.code)
