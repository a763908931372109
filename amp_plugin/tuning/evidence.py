"""Write chosen rules as a file whose comments say what each gained and how that was measured."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone

import torch

from amp_plugin.casting.rules_files import torch_release
from amp_plugin.tuning.measurement import Measurement
from amp_plugin.tuning.report import change, rows
from amp_plugin.tuning.search import Tried


def rules_file(
    device_type: str,
    changes: Sequence[Tried],
    *,
    before: Measurement,
    after: Measurement,
    head: Sequence[str],
) -> str:
    """Return a rules file.

    Args:
        device_type: of the rules.
        changes: the rules, each measured together with those above it.
        before: of the default rules.
        after: of the chosen ones.
        head: lines that say what was done.
    """
    version, today = (
        vars(sys.modules[__name__.partition(".")[0]])["__version__"],
        datetime.now(timezone.utc).date(),
    )
    made = f"amp_plugin {version}, torch {torch.__version__}, {platform.machine()}, {today}"
    comments = [*head, made, *(_line(*row) for row in rows(before, after))]
    text = "".join(f"# {comment}\n" for comment in comments)
    text += f"device_type: {device_type}\ntorch: '{torch_release()}'\n"
    return text + (f"rules:\n{_entries(changes, before)}" if changes else "rules: {}\n")


def _line(name: str, first: str, second: str, changed: str) -> str:
    return f"{name}: {first} -> {second}" + (f" ({changed})" if changed else "")


def _entries(changes: Sequence[Tried], before: Measurement) -> str:
    lines, last = [], before
    for entry in changes:
        (chosen,), now = entry.changes, entry.measurement or last
        gains = [
            f"{name} {gain}"
            for name, gain in (
                ("saved", change(last.saved_bytes, now.saved_bytes)),
                ("cast", change(last.cast_bytes, now.cast_bytes)),
                ("error", change(last.error, now.error)),
            )
            if gain
        ]
        if now.failed < last.failed:
            gains.insert(0, f"batches that overflow {last.failed} -> {now.failed}")
        lines.append(f"  {chosen.op}: {chosen.rule.value}  # {', '.join(gains)}\n")
        last = now
    return "".join(lines)
