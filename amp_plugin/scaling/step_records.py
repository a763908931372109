"""What a step came to as plain numbers, for a file, a tracker or a page.

::

    a step is known to the host  ->  its numbers are copied behind the work that is queued
    they have arrived            ->  a StepRecord goes to whoever asked:  log="run.jsonl", log=function

Nothing here waits for the device or launches a kernel. On a GPU a record comes some steps late; the last ones
come when the run ends.
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
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from amp_plugin.messages import only_warning
from amp_plugin.scaling.overflows import OverflowReport
from amp_plugin.scaling.ranks import rank_of_process
from amp_plugin.scaling.step_log import StepLog, StepResult, copy_to_host

NEWS: Final = logging.getLogger("amp_plugin")
"""What happens in a run, for people: skipped steps, spikes, where a file is written."""

_FILE_BYTES: Final = 64 * 2**20  # of a log before it is continued in a new file
_OLDER_FILES: Final = 9
_MOST_NAMES: Final = 5
_NO_LIMIT: Final = 3e38  # of float32; the limit before the first step that can be a spike


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one optimizer step came to.

    Attributes:
        step: The number of the step, from 1 on, of its optimizer in this run, skipped ones counted.
        optimizer: The optimizer: its place among those that step, and its type, as ``"0: AdamW"``.
        verdict: ``"landed"``, ``"overflow"``, ``"nan"``, ``"spike"`` or ``"held"``, as
            :attr:`amp_plugin.GradScaler.last_step`'s ``verdict``.
        skipped: Whether the weights are unchanged. A spike that was clipped is not skipped.
        loss_scale: The loss scale that the gradients came with; None if nothing is scaled.
        norm: The norm of the unscaled gradients before clipping; None if it was not measured, or is not
            finite.
        clipped_norm: As ``norm``, after all clipping.
        value: What ``on_spike`` has judged, the norm or the loss; None without it.
        limit: The largest value that was no spike; None without ``on_spike`` and in its warm-up.
        parameters: Whose gradients were not finite: the first five, those nearest the loss first.
        seconds: Since the step before, of any optimizer; since the start of the log for the first one.
        time: When the step returned, in seconds since 1970.
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

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """Return what a tracker draws: each number that is known, ``skipped`` as 0 or 1, by its name."""
        names = ("loss_scale", "norm", "clipped_norm", "value", "limit", "seconds")
        found = {name: getattr(self, name) for name in names} | {"skipped": float(self.skipped)}
        return {prefix + name: number for name, number in found.items() if number is not None}

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self))


class StepRecorder:
    """Makes a record of each step that a log tells of, and passes it on.

    Args:
        to: Takes the records: a path gets a line of JSON for each; a function is called with each. None: only
            the logger ``amp_plugin`` hears of steps that were skipped or clipped, at level INFO.

    Rank 0 records. What fails in it is one warning; the run goes on without records.
    """

    def __init__(self, to: str | Path | Callable[[StepRecord], Any] | None) -> None:
        self._to: Any = to if callable(to) else None
        self._path = None if to is None or callable(to) else Path(to)
        self._waiting: deque[_Arriving] = deque()
        self._names: dict[int, str] = {}  # of optimizers, by their id
        self._counts: dict[str, int] = {}
        self._last = time.time()
        self._is_on = True

    def follow(self, log: StepLog) -> None:
        """Record the steps of a log, from now on to the end of the process."""
        log.subscribe(self.hear, first=True)
        reference = weakref.ref(self)
        atexit.register(_pass_last_on, reference)

    def hear(self, step: StepResult) -> None:
        """Take a step that the host knows; pass on what has arrived."""
        if not self._is_on or rank_of_process():
            return
        name = self._names.setdefault(id(step.optimizer()), f"{len(self._names)}: {step.kind}")
        self._counts[name] = number = self._counts.get(name, 0) + 1
        if self._to is None and self._path is None:
            is_news = step.skipped or step.judged is not None
            if not (is_news and NEWS.isEnabledFor(logging.INFO)):
                return
        with only_warning(f"the log {self._path or self._to}", self._give_up):
            self._waiting.append(_Arriving(step, name, number, self._last))
            self._last = step.time
            self.pass_on()

    def pass_on(self, *, wait: bool = False) -> None:
        """Pass on the records whose numbers have arrived; with ``wait`` all of them."""
        while self._waiting and (wait or self._waiting[0].has_arrived()):
            self._write(self._waiting.popleft().record())

    def _write(self, record: StepRecord) -> None:
        if record.skipped or record.verdict != "landed":
            NEWS.info("%s", news_of(record))
        if self._to is None and self._path is not None:
            self._to = _writer_of(self._path)
        if self._to is not None:
            self._to(record)

    def _give_up(self) -> None:
        self._is_on = False
        self._waiting.clear()


class _Arriving:
    """The numbers of a step on their way to the host."""

    def __init__(self, step: StepResult, name: str, number: int, before: float) -> None:
        self._step, self._name, self._number = step, name, number
        self._seconds = step.time - before
        self._numbers = {key: _Copy(tensor) for key, tensor in step.numbers().items()}
        self._flags = [_Copy(flags) for flags in step.flags()] if step.skipped else []

    def has_arrived(self) -> bool:
        """Whether a record can be made without a wait."""
        return all(copy.has_arrived() for copy in (*self._numbers.values(), *self._flags))

    def record(self) -> StepRecord:
        """Return the record; waits for what has not arrived."""
        numbers = {key: copy.wait() for key, copy in self._numbers.items()}
        judged = numbers.get("judged")
        told = None if judged is None else [float(number) for number in judged.tolist()]
        code = 0 if told is None else int(told[2])
        norm, used = (_number(numbers.get(key)) for key in ("norm", "used_norm"))
        report = OverflowReport()
        if self._step.skipped and not code:
            report = self._step.report_by([copy.wait() for copy in self._flags])
        return StepRecord(
            step=self._number,
            optimizer=self._name,
            verdict=_verdict(code, norm, skipped=self._step.skipped),
            skipped=self._step.skipped,
            loss_scale=_number(numbers.get("loss_scale")),
            norm=_finite(norm),
            clipped_norm=_finite(self._clipped(used)),
            value=None if told is None else _finite(told[3]),
            limit=None if told is None or told[4] > _NO_LIMIT else _finite(told[4]),
            parameters=tuple(dict.fromkeys([*report.nan[::-1], *report.inf[::-1]]))[:_MOST_NAMES],
            seconds=self._seconds,
            time=self._step.time,
        )

    def _clipped(self, used: float | None) -> float | None:
        """Return the norm after the step's own clip."""
        if used is None or self._step.max_norm is None or self._step.skipped:
            return used
        return used * min(1.0, self._step.max_norm / (used + 1e-6))


class _Copy:
    """A tensor on its way to the host; one that is there, or of a device without events, as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._arriving = tensor, copy_to_host(tensor)

    def has_arrived(self) -> bool:
        """Whether the host can read it without a wait."""
        return self._arriving is None or bool(self._arriving[0].query())

    def wait(self) -> Tensor:
        """Return it on the host."""
        if self._arriving is None:
            return self._tensor.cpu()
        if not self._arriving[0].query():
            self._arriving[0].synchronize()
        return self._arriving[1]


def news_of(record: StepRecord) -> str:
    """Return what a step that did not land came to, in one line for people."""
    done = "was skipped" if record.skipped else "was clipped"
    why = {"overflow": "a gradient is infinite", "nan": "a gradient is nan"}.get(record.verdict, "")
    if record.verdict == "spike":
        why = f"a spike, {_shown(record.value)} above the limit {_shown(record.limit)}"
    elif record.verdict == "held":
        why = "an earlier spike has yet to be raised"
    where = f" ({', '.join(record.parameters)})" if record.parameters else ""
    scale = "" if record.loss_scale is None else f", at a loss scale of {record.loss_scale:g}"
    return f"step {record.step} of {record.optimizer} {done}: {why}{where}{scale}"


def _shown(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.5g}"


def _verdict(code: int, norm: float | None, *, skipped: bool) -> str:
    if code or not skipped:
        return ("landed", "spike", "held")[code]
    return "nan" if norm is not None and math.isnan(norm) else "overflow"


def _number(tensor: Tensor | None) -> float | None:
    return None if tensor is None else float(tensor.item())


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else number


# -- the file -------------------------------------------------------------------------------------

_open_files: dict[Path, RotatingFileHandler] = {}  # one for each path: two would rotate each other's


def _writer_of(path: Path) -> Callable[[StepRecord], None]:
    """Return what appends whole lines to a file, and goes on in a new one when it is large."""
    path = path.absolute()
    if path not in _open_files:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(path)
        handler = RotatingFileHandler(
            path, maxBytes=_FILE_BYTES, backupCount=_OLDER_FILES, encoding="utf-8", errors="backslashreplace"
        )
        vars(handler)["handleError"] = _raise_again  # it would print to stderr
        _open_files[path] = handler
        NEWS.info("steps are logged in %s", path)
    handler = _open_files[path]

    def write(record: StepRecord) -> None:
        line = record.line()
        handler.handle(logging.LogRecord(NEWS.name, logging.INFO, "", 0, "%s", (line,), None))

    return write


def _raise_again(_: logging.LogRecord) -> None:
    raise  # noqa: PLE0704 - logging calls it where it handles an error


def _end_torn_line(path: Path) -> None:
    """End the last line of a file if a killed run has left it without an end."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _pass_last_on(recorder: Callable[[], StepRecorder | None]) -> None:
    """Pass on what is left when the process ends."""
    if (known := recorder()) is not None:
        with only_warning("the log of steps", list):
            known.pass_on(wait=True)


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a log, older files first; torn lines are left out.

    Args:
        path: The file that ``log=`` names.

    Example:
        >>> import tempfile, torch
        >>> from amp_plugin import GradScaler, read_records
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scaler = GradScaler("cpu", log=f"{folder}/run.jsonl")
        ...     weight = torch.nn.Parameter(torch.ones(2))
        ...     optimizer = torch.optim.SGD([weight], lr=0.1)
        ...     scaler.scale(weight.sum()).backward()
        ...     value = scaler.step(optimizer)
        ...     scaler.update()
        ...     [(record["step"], record["verdict"]) for record in read_records(f"{folder}/run.jsonl")]
        [(1, 'landed')]
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
