"""What the ops of a run made, as a file: fingerprints in the order of the ops."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amp_plugin.numerics.fingerprint import Fingerprint

_FORMAT = "amp_plugin run 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One result of one op.

    Attributes:
        step: optimizer steps before it.
        direction: ``"forward"`` or ``"backward"``.
        module: path of the module; empty outside of modules.
        op: full name.
        line: the line that called it, or its forward op; empty if unknown.
        dtype: of the result.
        shape: of the result.
        result: what it held.
    """

    step: int
    direction: str
    module: str
    op: str
    line: str
    dtype: str
    shape: tuple[int, ...]
    result: Fingerprint

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}, {self.direction}, step {self.step}, {self.dtype}[{shape}]"


def save_records(records: Sequence[OpRecord], path: Path) -> None:
    """Write a run to a file of numpy's ``.npz`` format; nothing in it is pickled.

    Args:
        records: in the order of the ops.
        path: of the file; ``.npz`` is added where it is missing.

    Raises:
        ImportError: numpy is not installed.
    """
    numpy = _numpy()
    rows = [{key: value for key, value in asdict(record).items() if key != "result"} for record in records]
    results = [record.result for record in records]
    numpy.savez_compressed(
        path,
        format=numpy.array(_FORMAT),
        rows=numpy.frombuffer(json.dumps(rows).encode(), dtype=numpy.uint8),
        checksums=numpy.array([result.checksum for result in results], dtype=numpy.int64),
        numbers=numpy.array([[r.norm, r.largest, r.unfinite] for r in results], dtype=numpy.float64),
        counts=numpy.array([len(result.samples) for result in results], dtype=numpy.int64),
        samples=numpy.array([sample for r in results for sample in r.samples], dtype=numpy.float64),
    )


def load_records(path: Path) -> list[OpRecord]:
    """Read a run.

    Args:
        path: a file that ``save_records`` wrote.

    Raises:
        ImportError: numpy is not installed.
        ValueError: the file is no such run.
        OSError: it cannot be read.
    """
    numpy = _numpy()
    try:
        with numpy.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        if str(held["format"]) != _FORMAT:
            raise KeyError(_FORMAT)  # noqa: TRY301 - told below like any other file
        rows = json.loads(held["rows"].tobytes())
    except (ValueError, KeyError, EOFError) as error:
        msg = f"{path} is no recorded run; make one with: amp-plugin diagnose --save {path} script.py"
        raise ValueError(msg) from error
    ends = numpy.cumsum(held["counts"])
    samples = [tuple(part.tolist()) for part in numpy.split(held["samples"], ends)[: len(rows)]]
    columns = zip(rows, held["checksums"].tolist(), held["numbers"].tolist(), samples, strict=True)
    return [_record(*column) for column in columns]


def _record(row: dict[str, Any], checksum: int, numbers: list[float], samples: tuple[float, ...]) -> OpRecord:
    norm, largest, unfinite = numbers
    result = Fingerprint(
        checksum=checksum, norm=norm, largest=largest, unfinite=int(unfinite), samples=samples
    )
    return OpRecord(**{**row, "shape": tuple(row["shape"])}, result=result)


def _numpy() -> Any:
    try:
        import numpy as np  # noqa: PLC0415 - torch works without
    except ImportError as error:
        msg = "recorded runs are files of numpy's format; run: pip install numpy"
        raise ImportError(msg) from error
    return np
