"""Records skipped steps, casts that overflow or underflow, and numbers that are not finite."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from typing_extensions import Self

from amp_plugin.numerics.diagnose import Diagnosis
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.op import Call, Region
from amp_plugin.numerics.values import is_low_precision, unwatched


class LostNumbers:
    """A context manager that records skipped steps, lossy casts and non-finite numbers.

    Call ``report()`` after its end.
    """

    def __init__(self) -> None:
        self._diagnosis = Diagnosis(keep_going=True)
        # The number of values that casts lost, by kind, dtype, module and line.
        self._lost: Counter[tuple[str, str, str, str]] = Counter()
        self._skips = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open the region."""
        with ExitStack() as stack:
            stack.enter_context(self._diagnosis)
            stack.enter_context(Region(Tracker(), self))
            scaler = torch.amp.GradScaler
            stack.enter_context(patch.object(scaler, "update", self._counting(scaler.update)))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the region."""
        self.close()

    def close(self) -> None:
        """Close the region. A second call does nothing."""
        self._open.close()

    def _counting(self, update: Any) -> Any:
        """Count the updates that lower the loss scale. Each such update follows a skipped step."""

        @wraps(update)
        def counted(scaler: Any, *args: Any, **kwargs: Any) -> None:
            with unwatched():
                before = _scale_of(scaler)
            update(scaler, *args, **kwargs)
            with unwatched():
                self._skips += not args and not kwargs and _scale_of(scaler) < before

        return counted

    def after(self, call: Call, output: Any) -> None:
        """Count the values that a cast to 16 bits makes infinite or 0. Called after each op."""
        if call.traits.base not in {"_to_copy", "copy"} or not call.arguments:
            return
        given = call.arguments[-1].tensor
        for made in call.made(output):
            result = made.tensor
            if (
                not is_low_precision(result.dtype)
                or is_low_precision(given.dtype)
                or result.shape != given.shape
            ):
                continue
            kinds = {
                "overflow": given.isfinite() & ~result.isfinite(),
                "underflow": (given != 0) & (result == 0),
            }
            for kind, lost in kinds.items():
                count = int(lost.sum())
                if count:
                    dtype = str(result.dtype).removeprefix("torch.")
                    key = (
                        kind,
                        dtype,
                        call.site.module or "no module",
                        str(call.site.place or "an unknown line"),
                    )
                    self._lost[key] += count

    def report(self) -> str:
        """Return text about skipped steps, lossy casts and non-finite numbers, or "" if there are none."""
        found = [str(finding) for finding in self._diagnosis.findings]
        found += [
            f"a cast to {dtype} lost {count} values by {kind}, in {module}, {place}"
            for (kind, dtype, module, place), count in self._lost.items()
        ]
        if self._skips:
            found.append(f"{self._skips} steps were skipped, because their gradients were not finite")
        return "\n\n".join(found)


def _scale_of(scaler: Any) -> float:
    """Return the loss scale without applying a requested update, which ``get_scale()`` would apply."""
    value = getattr(scaler, "_scale", None)
    return 0.0 if value is None else float(value.item())
