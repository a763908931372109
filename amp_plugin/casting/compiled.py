"""Makes torch.compile and torch.export see the op rules of autocast regions while they trace.

In a traced graph, an amp_plugin region becomes ``torch.autocast`` blocks plus an op that states the region's
op rules. The op contains the full text of the rules, so that graphs and the keys of torch's compile caches
have the same meaning in every process. ``csrc/rules_in_force.h`` explains how torch's autocast state encodes
the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as torchs_autocast
from torch.compiler import is_dynamo_compiling
from torch.fx.node import has_side_effect
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Self

from amp_plugin.casting.installed_kernels import DEFAULT, DEVICE_NUMBERS, KERNELS
from amp_plugin.casting.rules import OpRules, rules_with_content
from amp_plugin.casting.rules_in_force import number_on
from amp_plugin.kernels.build import require_native

# The number of the active rule set is encoded as two digits.
# Each digit is the autocast dtype of an unused device type. ZEROS are the dtypes that encode the digit 0.
# While _blocks() is open, the autocast dtype of another unused device type is set to _OPEN.
DIGITS = ("maia", "mtia")
ZEROS = (torch.bfloat16, torch.float16)
_GATE, _OPEN = "ipu", torch.bfloat16


def _use_rules(device_type: str, content: str) -> None:
    if torch.get_autocast_dtype(_GATE) is not _OPEN or device_type not in DEVICE_NUMBERS:
        return
    with _disable_current_modes():
        require_native("a rule set other than the default one")
        KERNELS.install()
        if content:
            number = KERNELS.assigned_number(rules_with_content(content))
        else:
            number = max(DEFAULT, number_on(device_type))
        KERNELS.native.show_rules(DEVICE_NUMBERS[device_type], number)


_LIBRARY: Any = Library("amp_plugin", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("use_rules(str device_type, str content) -> ()")
_LIBRARY.impl("use_rules", _use_rules, "CompositeImplicitAutograd")  # runs during tracing
_USE_RULES = torch.ops.amp_plugin.use_rules.default
has_side_effect(_USE_RULES)


def are_rules_in_force() -> bool:
    """Return whether op rules other than the default ones are in force in this thread.

    Tracers treat the result as a constant.
    """
    return torch.get_autocast_dtype(DIGITS[0]) is not ZEROS[0]


def content_of(rules: OpRules | None) -> str:
    """Return the string by which a graph refers to op rules, or ``""`` for the default rules."""
    return "" if rules is None else rules.content


@contextmanager
def _blocks(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None, content: str
) -> Iterator[None]:
    # Dynamo would record the autocast dtypes that identify the rule set, so they are not set under Dynamo.
    # In another process, the same autocast dtypes may identify a different rule set.
    low, high = (None, None) if is_dynamo_compiling() else ZEROS
    with (
        torchs_autocast(_GATE, _OPEN, False),
        torchs_autocast(DIGITS[0], low, False),
        torchs_autocast(DIGITS[1], high, False),
        torchs_autocast(device_type, dtype, enabled, cache_enabled),
    ):
        _USE_RULES(device_type, content)
        yield


class TracedRegion:
    """An autocast region for tracers.

    ``content`` states the region's op rules, or is "" for default rules.
    """

    def __init__(self, *made_with: Any) -> None:  # arguments of ``_blocks``
        self._made_with = made_with
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        """Open the blocks."""
        blocks = _blocks(*self._made_with)
        self._open.append(blocks)
        blocks.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the autocast blocks that the last ``__enter__`` opened."""
        self._open.pop().__exit__(*exc_info)


def _traced(*made_with: Any) -> TracedRegion:
    return TracedRegion(*made_with)


def teach_dynamo(kind: type[torch.autocast]) -> None:
    """Teach Dynamo to trace regions that were created outside compiled code, then restart the current trace.

    Dynamo treats instances of subclasses of ``torch.autocast`` like torch's own blocks, so it would drop the
    rules of a region. Therefore ``teach_dynamo`` adds ``kind`` to a table of types, and Dynamo consults this
    table first.

    Raises:
        RestartAnalysis: every call raises this exception, so that Dynamo traces the frame again.
    """
    from torch._dynamo.exc import RestartAnalysis  # noqa: PLC0415 - Dynamo runs
    from torch._dynamo.guards import GuardBuilder  # noqa: PLC0415
    from torch._dynamo.variables.base import VariableTracker  # noqa: PLC0415
    from torch._dynamo.variables.builder import VariableBuilder  # noqa: PLC0415
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable  # noqa: PLC0415

    def variable(builder: Any, region: Any) -> Any:
        builder.install_guards(GuardBuilder.ID_MATCH)
        *values, rules = region.made_with()
        if rules is None and not are_rules_in_force():
            return AutocastModeVariable(target_values=values, source=builder.source)
        made = VariableTracker.build(builder.tx, _traced)
        arguments = [VariableTracker.build(builder.tx, value) for value in (*values, content_of(rules))]
        return made.call_function(builder.tx, arguments, {})

    VariableBuilder._type_dispatch()[kind] = variable
    raise RestartAnalysis(restart_reason="a region of amp_plugin's was met")
