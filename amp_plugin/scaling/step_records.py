"""Records of optimizer steps as plain numbers, for files, experiment trackers and web pages.

::

    hear(step)   When the host knows whether the step was skipped, copy the step's numbers to the host.
    pass_on()    When the copies have arrived, make a StepRecord, and write it or pass it to a function.

Recording a step does not wait for the device and launches no kernel. On a GPU, a record is written a few
steps later. The last records are written when the process ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import torch

from amp_plugin.messages import only_warning
from amp_plugin.scaling.ranks import rank_of_process
from amp_plugin.scaling.step_log import StepLog, StepResult

NEWS: Final = logging.getLogger("amp_plugin")
"""The logger that reports skipped steps, spikes, and where log files are written."""

_FILE_BYTES: Final = 64 * 2**20  # a new log file is started at this size
_OLDER_FILES: Final = 9
_MOST_NAMES: Final = 5
# A spike limit above this number is recorded as None.
# During warm-up, the spike limit is float32's largest number, 3.4e38, and no step counts as a spike.
_NO_LIMIT: Final = 3e38


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The record of one optimizer step.

    Attributes:
        step: The number of the step, from 1 on. The steps of each optimizer are counted separately, from the
            start of this run, including skipped steps.
        optimizer: The number of the optimizer and the name of its class, separated by a colon. The optimizer
            that stepped first has number 0.
        verdict: One of ``"landed"``, ``"overflow"``, ``"nan"``, ``"spike"`` and ``"held"``, the same as the
            ``verdict`` of :meth:`amp_plugin.GradScaler.last_step`.
        skipped: True if the weights have not changed. A spike that was clipped is not skipped.
        loss_scale: The loss scale by which the loss was multiplied; None if no loss is scaled.
        norm: The norm of the unscaled gradients before clipping; None if it was not measured, or is not
            finite.
        clipped_norm: The norm of the unscaled gradients after all clipping.
        value: The norm or loss that ``on_spike`` compared with its limit; None without ``on_spike``.
        limit: The largest norm or loss that ``on_spike`` would have accepted; None without ``on_spike`` and
            during its warm-up.
        parameters: At most five parameters whose gradients were not finite. The parameters nearest the loss
            come first.
        seconds: The time since the previous step of any optimizer. For the first step, ``seconds`` is the
            time since the log was opened.
        time: The time when the step returned, in seconds since 1970.
    """

    step: int
    optimizer: str
    verdict: str
    skipped: bool
    loss_scale: float | None = None
    norm: float | None = None
    clipped_norm: float | None = None
    value: float | None = None
    limit: float | None = None
    parameters: tuple[str, ...] = ()
    seconds: float = 0.0
    time: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, step: StepResult, seconds: float = 0.0) -> StepRecord:
        """Return the record of a step. The step's results must already be on the host."""
        told = (None, None) if step.judged is None else step.judged[3:5].tolist()
        report = step.overflow_report() if step.skipped else None
        names = () if report is None else (*report.nan[::-1], *report.inf[::-1])
        return cls(
            step=step.number,
            optimizer=step.name,
            verdict=step.verdict,
            skipped=step.skipped,
            loss_scale=step.scale_before if step.is_scaled else None,
            norm=_finite(step.norm),
            clipped_norm=_finite(step.clipped_norm),
            value=_finite(told[0]),
            limit=_finite(None if told[1] is None or told[1] > _NO_LIMIT else told[1]),
            parameters=tuple(dict.fromkeys(names))[:_MOST_NAMES],
            seconds=seconds,
            time=step.time,
        )

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Return a dict that maps names to numbers, for an experiment tracker. ``skipped`` is 0 or 1."""
        names = ("loss_scale", "norm", "clipped_norm", "value", "limit", "seconds")
        found = {name: getattr(self, name) for name in names} | {"skipped": float(self.skipped)}
        return {prefix + name: number for name, number in found.items() if number is not None}

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self))


class StepRecorder:
    """Make a StepRecord for each step on rank 0, and write it to a file or pass it to a function.

    If a record cannot be written, there is one warning, and training continues without records.

    Args:
        to: Where records go. If ``to`` is a path, each record is written to that file as one line of JSON. If
            ``to`` is a function, the function is called with each record. If ``to`` is None, no record is
            written, and the logger ``amp_plugin`` gets an INFO message for each step that was skipped or
            clipped.
    """

    def __init__(self, to: str | Path | Callable[[StepRecord], Any] | None) -> None:
        self._to = to if to is None or callable(to) else Path(to).absolute()
        # For each step whose numbers are being copied: CUDA events, and a function that makes the record.
        # Set to None once a record cannot be written. No step is recorded after that.
        self._waiting: deque[tuple[Sequence[torch.Event], Callable[[], StepRecord]]] | None = deque()
        self._last = time.time()  # the time of the step before

    def follow(self, log: StepLog) -> None:
        """Record every step that is added to ``log``, until the process ends."""
        log.subscribe(self.hear, first=True)
        atexit.register(_pass_last_on, weakref.ref(self))

    def hear(self, step: StepResult) -> None:
        """Record a step, once the host knows whether it was skipped."""
        if self._waiting is None or rank_of_process():
            return
        is_news = (step.skipped or step.judged is not None) and NEWS.isEnabledFor(logging.INFO)
        if self._to is None and not is_news:
            return
        with only_warning(f"the log {self._to}", self._give_up):
            events, copied = step.to_host()
            self._waiting.append((events, partial(StepRecord.of, copied, step.time - self._last)))
            self._last = step.time
            self.pass_on()

    def pass_on(self, *, wait: bool = False) -> None:
        """Write the records whose numbers have been copied to the host.

        With ``wait``, wait for all copies.
        """
        while self._waiting and (wait or all(event.query() for event in self._waiting[0][0])):
            events, make = self._waiting.popleft()
            for event in events if wait else ():
                event.synchronize()
            self._write(make())

    def _write(self, record: StepRecord) -> None:
        if record.verdict != "landed":
            NEWS.info("%s", news_of(record))
        if isinstance(self._to, Path):
            _append(self._to, record)
        elif self._to is not None:
            self._to(record)

    def _give_up(self) -> None:
        self._waiting = None


def news_of(record: StepRecord) -> str:
    """Return a one-line log message about a step that was skipped or clipped."""
    done = "was skipped" if record.skipped else "was clipped"
    why = {"overflow": "a gradient is infinite", "nan": "a gradient is nan"}.get(record.verdict, "")
    if record.verdict == "spike":
        why = f"a spike, {_shown(record.value)} above the limit {_shown(record.limit)}"
    elif record.verdict == "held":
        why = "an earlier spike has yet to be raised"
    where = f" ({', '.join(record.parameters)})" if record.parameters else ""
    scale = "" if record.loss_scale is None else f", at a loss scale of {record.loss_scale:.10g}"
    return f"step {record.step} of {record.optimizer} {done}: {why}{where}{scale}"


def _shown(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.5g}"


def _finite(number: torch.Tensor | float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(number)


# -- the file --------------------------

_open_files: dict[Path, RotatingFileHandler] = {}
"""The handler of each path. Two handlers of one file would rotate it twice."""


def _append(path: Path, record: StepRecord) -> None:
    """Append a whole line to a file. A large file is continued in a new one."""
    if path not in _open_files:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)
        handler = RotatingFileHandler(
            path, maxBytes=_FILE_BYTES, backupCount=_OLDER_FILES, encoding="utf-8", errors="backslashreplace"
        )
        vars(handler)["handleError"] = _raise_again  # it would print to stderr
        _open_files[path] = handler
        NEWS.info("steps are logged in %s", path)
    line = logging.LogRecord(NEWS.name, logging.INFO, "", 0, "%s", (record.line(),), None)
    _open_files[path].handle(line)


def _raise_again(_: logging.LogRecord) -> None:
    raise  # noqa: PLE0704 - logging calls it while it handles an error


def _end_torn_line(path: Path) -> None:
    """Append a newline to a log file if a run was killed while it was writing the last line."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _pass_last_on(recorder: Callable[[], StepRecorder | None]) -> None:
    """Write the remaining records when the process ends."""
    if (known := recorder()) is not None:
        with only_warning("the log of steps", list):
            known.pass_on(wait=True)


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a log file and of its rotated files, oldest first. Broken lines are skipped.

    Args:
        path: The path that was given as ``log=``.

    Example:
        >>> import tempfile, torch
        >>> from amp_plugin import GradScaler, read_records
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = f"{folder.name}/run.jsonl"
        >>> scaler = GradScaler("cpu", log=path)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler.scale(weight.sum()).backward()
        >>> value = scaler.step(optimizer)
        >>> scaler.update()
        >>> [(record["step"], record["verdict"]) for record in read_records(path)]
        [(1, 'landed')]
        >>> folder.cleanup()
    """
    path = Path(path)
    older = [path.with_name(f"{path.name}.{number}") for number in range(_OLDER_FILES, 0, -1)]
    records = []
    for file in (*older, path):
        lines: Sequence[str] = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return records
