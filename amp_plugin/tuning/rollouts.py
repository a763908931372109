"""Read rollout files, in which a generator records its sampled tokens and their log-probabilities.

A rollout file has one JSON object per line. Each line is one sequence::

    {"version": 1, "prompt_ids": [1, 15, 9], "token_ids": [4, 27], "logprobs": [-0.71, -2.05],
     "temperature": 1.0, "top_p": 1.0}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from amp_plugin.messages import did_you_mean
from amp_plugin.tuning.log_probs import Sampling

VERSION: Final = 1
_OPTIONAL: Final = {"temperature", "top_p"}
_ROUNDING: Final = 1e-3  # rounding may make a log-probability exceed 0 by this much


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence of a rollout file.

    Attributes:
        prompt_ids: The token ids of the prompt, at least one.
        token_ids: The token ids that the generator sampled, at least one.
        logprobs: The recorded natural logarithm of the probability of each sampled token.
        temperature: The temperature with which the generator sampled.
        top_p: The top-p with which the generator sampled. 1 means that it sampled from all tokens.

    Raises:
        ValueError: A value is not allowed. The error message names the wrong value and says which values are
            allowed.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Check the values, and turn lists into tuples."""
        for name in ("prompt_ids", "token_ids", "logprobs"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)) or not values:
                msg = f"{name}: give a list with at least one number, got {values!r}"
                raise ValueError(msg)
            object.__setattr__(self, name, tuple(values))
        for name in ("prompt_ids", "token_ids"):
            wrong = [value for value in getattr(self, name) if type(value) is not int or value < 0]
            if wrong:
                msg = f"{name}: give token ids, whole numbers from 0, got {wrong[0]!r}"
                raise ValueError(msg)
        self._check_log_probabilities()
        for name, most in (("temperature", math.inf), ("top_p", 1.0)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= most or not math.isfinite(value):
                limits = "a number above 0" + ("" if most == math.inf else " and at most 1")
                msg = f"{name}: give {limits}, got {value!r}"
                raise ValueError(msg)

    def _check_log_probabilities(self) -> None:
        if len(self.logprobs) != len(self.token_ids):
            msg = (
                f"logprobs: got {len(self.logprobs)} numbers for {len(self.token_ids)} token_ids; give one "
                "for each sampled token, and none for the prompt"
            )
            raise ValueError(msg)
        for value in self.logprobs:
            if not _is_number(value) or not math.isfinite(value):
                msg = (
                    f"logprobs: give finite numbers, got {value!r}; leave out sequences that were not "
                    "recorded completely"
                )
                raise ValueError(msg)
            if value > _ROUNDING:
                msg = (
                    f"logprobs: give natural logarithms of probabilities, which are at most 0, got {value!r}"
                )
                raise ValueError(msg)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Sequences of a rollout as tensors.

    Attributes:
        tokens: Prompts and sampled tokens, int64 of shape (number of sequences, length of the longest
            sequence). Shorter sequences are padded with 0 on the right, which does not change the results of
            a causal model.
        places: Two tensors with one number per sampled token, int64 of shape (sampled tokens,). For each
            sampled token, the first tensor holds the index of the sequence to which the token belongs. For
            each sampled token, the second tensor holds the position whose logits predict the token.
        recorded: The recorded log-probabilities, float64 of shape (sampled tokens,).
        stated: The temperature and top-p that the rollout file states, for each sampled token.
    """

    tokens: Tensor
    places: tuple[Tensor, Tensor]
    recorded: Tensor
    stated: Sampling

    @property
    def targets(self) -> Tensor:
        """The sampled tokens, int64 of shape (sampled tokens,)."""
        rows, columns = self.places
        return self.tokens[rows, columns + 1]

    @staticmethod
    def of(samples: Sequence[Sample]) -> RolloutBatch:
        """Return several sequences as one batch."""
        longest = max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
        tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
        rows: list[int] = []
        columns: list[int] = []
        for row, sample in enumerate(samples):
            begin, count = len(sample.prompt_ids), len(sample.token_ids)
            tokens[row, : begin + count] = torch.tensor([*sample.prompt_ids, *sample.token_ids])
            rows += [row] * count
            columns += range(begin - 1, begin - 1 + count)

        def stated(name: str) -> Tensor:
            values = [getattr(samples[row], name) for row in rows]
            return torch.tensor(values, dtype=torch.float64)

        return RolloutBatch(
            tokens=tokens,
            places=(torch.tensor(rows), torch.tensor(columns)),
            recorded=torch.tensor([value for s in samples for value in s.logprobs], dtype=torch.float64),
            stated=Sampling(temperature=stated("temperature"), top_p=stated("top_p")),
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled tokens and their log-probabilities, as a generator recorded them.

    Args:
        samples: The sequences.

    Raises:
        ValueError: There is no sequence.

    Example:
        >>> rollout = Rollout.of([[1, 15]], [[4, 27]], [[-0.71, -2.05]])
        >>> rollout.samples[0].token_ids
        (4, 27)
    """

    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        """Check that there are sequences."""
        object.__setattr__(self, "samples", tuple(self.samples))
        if not self.samples:
            msg = (
                "a rollout needs at least one sequence; a few hundred sampled tokens are enough to tell "
                "rounding from other causes"
            )
            raise ValueError(msg)

    @staticmethod
    def of(
        prompt_ids: Iterable[Sequence[int]],
        token_ids: Iterable[Sequence[int]],
        logprobs: Iterable[Sequence[float]],
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> Rollout:
        """Return a rollout from lists with one entry per sequence.

        Args:
            prompt_ids: The token ids of the prompts.
            token_ids: The token ids that the generator sampled.
            logprobs: The recorded log-probabilities of the sampled tokens.
            temperature: The temperature with which the generator sampled.
            top_p: The top-p with which the generator sampled.

        Raises:
            ValueError: A value is not allowed.
        """
        rows = zip(prompt_ids, token_ids, logprobs, strict=True)
        return Rollout(
            tuple(
                Sample(
                    prompt_ids=tuple(prompt),
                    token_ids=tuple(tokens),
                    logprobs=tuple(values),
                    temperature=temperature,
                    top_p=top_p,
                )
                for prompt, tokens, values in rows
            )
        )

    @staticmethod
    def from_jsonl(path: str | Path) -> Rollout:
        """Read a rollout file, which has one JSON object per line.

        The keys of each object are ``version`` and the attributes of :class:`Sample`.

        Args:
            path: The file.

        Raises:
            ValueError: A line is wrong. The error message names the file, the line and the key.
            OSError: The file cannot be read.
        """
        samples = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    samples.append(_sample_of(line))
                except ValueError as error:
                    msg = f"{path}, line {number}: {error}"
                    raise ValueError(msg) from error
        if not samples:
            msg = f"{path} contains no sequence; write one JSON object per line"
            raise ValueError(msg)
        return Rollout(tuple(samples))

    def save(self, path: str | Path) -> None:
        """Write the rollout to a file that ``from_jsonl`` reads."""
        lines = [json.dumps({"version": VERSION, **asdict(sample)}) + "\n" for sample in self.samples]
        Path(path).write_text("".join(lines), encoding="utf-8")

    def batches(self, size: int) -> list[RolloutBatch]:
        """Return the sequences in batches of at most ``size``."""
        parts = [self.samples[begin : begin + size] for begin in range(0, len(self.samples), size)]
        return [RolloutBatch.of(part) for part in parts]


def _sample_of(line: str) -> Sample:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"not JSON: {error}"
        raise ValueError(msg) from error
    known = ["version", *(entry.name for entry in fields(Sample))]
    if not isinstance(found, dict):
        msg = f"give an object with the keys {', '.join(known)}, got {type(found).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - of the file, not of an argument
    for key in found:
        if key not in known:
            near = did_you_mean(key, known, aliases=_ALIASES)
            msg = f"unknown key {key!r}{near}; allowed: {', '.join(known)}"
            raise ValueError(msg)
    if missing := [name for name in known if name not in found and name not in _OPTIONAL]:
        msg = (
            f"the key {missing[0]!r} is missing; needed: {', '.join(n for n in known if n not in _OPTIONAL)}"
        )
        raise ValueError(msg)
    version = found.pop("version")
    if version != VERSION:
        msg = f"version: got {version!r}; this release reads version {VERSION}"
        raise ValueError(msg)
    return Sample(**found)


# Maps the names used by inference engines to the keys of a rollout file.
_ALIASES: Final = {
    "prompt_token_ids": "prompt_ids",
    "input_ids": "prompt_ids",
    "output_ids": "token_ids",
    "completion_ids": "token_ids",
    "response_ids": "token_ids",
    "log_probs": "logprobs",
    "logps": "logprobs",
    "old_logprobs": "logprobs",
}
