"""``python -m recipes list`` and ``python -m recipes run NAME [--config FILE] [key=value ...]``."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from recipes import catalogue

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Training programs, one idea each.")


@app.command("list")
def show() -> None:
    """Show all recipes, one line each."""
    table = Table("recipe", "what it shows", title="python -m recipes run NAME [key=value ...]")
    for name in catalogue.NAMES:
        table.add_row(name, catalogue.about(name))
    Console().print(table)


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(context: typer.Context, name: str) -> None:
    """Run the recipe NAME; more arguments: --config FILE, and key=value for its config."""
    try:
        catalogue.load(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    catalogue.run(name, context.args)


if __name__ == "__main__":
    app(prog_name="python -m recipes")
