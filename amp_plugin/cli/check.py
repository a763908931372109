"""Define the command `amp-plugin check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

import amp_plugin
from amp_plugin.cli.arguments import fail


def check(
    paths: Annotated[list[Path], typer.Argument(exists=True, help="Python files, notebooks and folders.")],
    fix: Annotated[bool, typer.Option("--fix", help="Rewrite deprecated names in the files.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what --fix would change.")] = False,
    output: Annotated[
        Literal["text", "github", "sarif"],
        typer.Option("--format", help="The format in which findings are printed."),
    ] = "text",
    select: Annotated[str, typer.Option(help="The rules to check, such as AMP001,AMP002.")] = "",
    ignore: Annotated[str, typer.Option(help="The rules to leave out, such as AMP001,AMP002.")] = "",
    baseline: Annotated[
        Path | None, typer.Option(exists=True, help="Report only findings that are not in this file.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write the findings to this file, and report nothing.")
    ] = None,
) -> None:
    """Find mixed-precision mistakes in Python source code.

    The exit code is 1 if mistakes are found, and 2 if a file cannot be parsed. The files are not run, and
    torch is not imported. Settings are read from the table [tool.amp-plugin.check] in pyproject.toml. The
    comment `# amp: ignore[AMP001]` silences a line.
    """
    from amp_plugin.check import checker, formats  # noqa: PLC0415 - only this command needs it
    from amp_plugin.check.settings import Settings  # noqa: PLC0415

    if diff and output != "text":
        fail("--diff prints text; leave out --format", code=2)
    if fix and diff:
        fail("--diff shows the changes and --fix makes them; give only one of them", code=2)
    try:
        settings = Settings.of_project(
            Path.cwd(), select=_codes(select), ignore=_codes(ignore), baseline=baseline
        )
        if write_baseline is not None:
            settings = replace(settings, baseline=None)
        report = checker.check(paths, settings, fix=fix, diff=diff)
    except (OSError, ValueError) as error:
        fail(str(error), code=2)
    if write_baseline is not None:
        report = checker.write_baseline(write_baseline, report)
    if output == "sarif":
        print(formats.as_sarif(report, amp_plugin.__version__))
    elif output == "github":
        print(formats.as_github(report))
    else:
        print("\n".join([*report.diffs, formats.as_text(report)]))
    raise typer.Exit(report.exit_code)


def _codes(given: str) -> list[str]:
    return [code.strip().upper() for code in given.split(",") if code.strip()]
