"""`amp-plugin report`: run a program and draw what precision does to it into one page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from amp_plugin.cli.arguments import Arguments, AsModule, Script, fail, program_of

Page = Annotated[Path, typer.Option("--page", help="The page, an HTML file.")]


def report(
    script: Script, page: Page = Path("run.html"), arguments: Arguments = None, as_module: AsModule = False
) -> None:
    """Run a script and draw it into one HTML page while it runs; the exit code is the script's.

    The page shows loss scale, skips, norms, how near gradients come to overflow, and the op and line behind a
    skipped step. The script need not import amp_plugin: it runs on it, as under `amp-plugin run`.
    """
    from amp_plugin.adapters.takeover import Takeover  # noqa: PLC0415 - loads torch
    from amp_plugin.program import run_program  # noqa: PLC0415 - loads torch
    from amp_plugin.run_page.program import ProgramPage  # noqa: PLC0415 - loads torch

    program = program_of(script, as_module=as_module, command="report")
    try:
        drawn = ProgramPage(page)
    except ImportError as error:
        fail(str(error), code=1)
    takeover = Takeover(Path(program.name).name)
    ran = run_program(program, arguments or [], around=_both(takeover, drawn))
    if drawn.page is not None or not ran.code:  # otherwise the error above explains the missing page
        print(f"amp-plugin report: {program.name} {drawn.outcome()}", file=sys.stderr)
    raise typer.Exit(ran.code)


@contextmanager
def _both(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield
