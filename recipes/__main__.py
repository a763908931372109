"""Commands: ``python -m recipes list``, ``python -m recipes run NAME [--config FILE] [key=value ...]``."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from recipes import catalogue

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Training programs, one idea each.")


@app.command("list")
def show() -> None:
    """Print all recipes, one line each."""
    table = Table(box=None, show_header=False)
    for name in catalogue.NAMES:
        table.add_row(name, catalogue.about(name))
    console = Console()
    console.print(table)
    console.print("\nRun one with: python -m recipes run NAME [key=value ...]", highlight=False, markup=False)
    console.print("Its keys:     python -m recipes run NAME --help", highlight=False)


@app.command(
    "run",
    add_help_option=False,  # `run NAME --help` shows the recipe's own help
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def run(context: typer.Context, name: str) -> None:
    """Run the recipe NAME. --config FILE sets the config file, and key=value sets a single config key."""
    if name in {"-h", "--help"}:
        typer.echo(context.get_help())
        return
    try:
        catalogue.load(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    catalogue.run(name, context.args)


if __name__ == "__main__":
    app(prog_name="python -m recipes")
