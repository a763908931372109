"""The commands about op rules: `amp-plugin rules show` and `amp-plugin rules diff`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from amp_plugin.cli.arguments import AsJson, Device, fail, show

if TYPE_CHECKING:
    from amp_plugin.casting.rules import OpRules

commands = typer.Typer(
    name="rules", help="Show op rules, or where two sets of them differ.", no_args_is_help=True
)

_WHAT = "default, a policy such as torch-2.11, or a rules file."


@commands.command(name="show")
def show_rules(
    what: Annotated[str, typer.Argument(help=_WHAT)] = "default",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List each op with its rule."""
    (rules,) = _rule_sets([what], device)
    listed = {op: rules.described(op) for op in sorted({*rules.rules, *rules.keep})}
    if as_json:
        print(json.dumps({"device_type": rules.device_type, "rules": listed}, indent=2))
        return
    table = _table(f"{len(listed)} rules on {rules.device_type}: {what}", "op", "rule")
    for op, rule in sorted(listed.items(), key=lambda row: (row[1], row[0])):
        table.add_row(op, rule)
    show(table)


@commands.command(name="diff")
def diff_rules(
    first: Annotated[str, typer.Argument(help=_WHAT)],
    second: Annotated[str, typer.Argument(help="The same.")] = "default",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List the ops that two sets of rules treat differently; exit code 1 if there are any."""
    chosen, other = _rule_sets([first, second], device)
    differing = chosen.diff(other)
    if as_json:
        print(json.dumps({"device_type": chosen.device_type, "ops": differing}, indent=2))
    elif differing:
        title = f"{len(differing)} ops treated differently on {chosen.device_type}"
        table = _table(title, "op", first, second)
        for op, pair in differing.items():
            table.add_row(op, *pair)
        show(table)
    else:
        print(f"no op is treated differently on {chosen.device_type}")
    raise typer.Exit(1 if differing else 0)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _rule_sets(words: list[str], device: str | None) -> list[OpRules]:
    """Return the rules that words stand for, all of one device: the one given, a file's, or the best here."""
    from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - loads torch
    from amp_plugin.cli.doctor import default_device  # noqa: PLC0415 - loads torch

    try:
        files = {word: OpRules.from_yaml(word) for word in words if word.endswith((".yaml", ".yml"))}
        devices = {rules.device_type for rules in files.values()} | ({device} if device else set())
        if len(devices) > 1:
            fail(f"rules of {' and '.join(sorted(devices))} differ in device; give those of one", code=2)
        of = devices.pop() if devices else default_device()
        default = {"default": OpRules.default(of)}
        return [files.get(word) or default.get(word) or OpRules.named(word, of) for word in words]
    except (OSError, ValueError) as error:
        fail(f"{error}; give {_WHAT}", code=2)
