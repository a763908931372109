"""One run of a sequence: the real side, the oracle, and what events share."""

from __future__ import annotations

from typing import Any

from tests.fuzz.oracle import Oracle
from tests.fuzz.predictions import may_meet
from tests.fuzz.scale_model import Disagreement
from tests.fuzz.scene import Scene, value_of
from tests.fuzz.setups import Setup

NOT_SCALED_YET = "Attempted .* but _scale is None"


class Run:
    """What an event works on."""

    def __init__(self, setup: Setup, scaler: type) -> None:
        self.setup = setup
        self.oracle = Oracle(setup)
        self.scene = Scene(setup, self.oracle, scaler)
        self.early: tuple[str, Any] | None = None  # scale and terms of a loss whose backward is still to come
        self.saved: dict[str, Any] = {}  # the model's part of a saved state
        self.skipped = 0  # steps of all optimizers

    def kind(self, o: int) -> str:
        return self.setup.kinds[o]

    def members(self, o: int) -> list[int]:
        return self.oracle.members[o]

    def owned_by(self, *kinds: str) -> set[int]:
        """The parameters that optimizers of these kinds step."""
        return {i for o, kind in enumerate(self.setup.kinds) if kind in kinds for i in self.members(o)}

    def may_call(self, o: int) -> bool:
        """Whether a call on an optimizer has a meaning: something was scaled, and it may be met; meets it."""
        if not self.oracle.used or self.kind(o) == "takes_gradients" or not may_meet(self.oracle, o):
            return False
        self.oracle.meet(o)
        return True

    def backward(self, name: str, kind: str, pairs: Any) -> None:
        oracle, scaler = self.oracle, self.scene["scaler"]
        oracle.shown = {
            name_of_loss: scaler.get_scale(name_of_loss or None) for name_of_loss in oracle.scales.names
        }
        oracle.backward(name, lambda: value_of(kind, pairs, oracle.params), {i for i, _ in pairs})
        for index in self.owned_by("takes_gradients"):
            oracle.params[index].grad = None

    def take_side(self, o: int) -> None:
        """Where a folded clip and an edit are in dispute, follow the real side."""
        self.oracle.take_side(o, lambda index: self.scene.params[index].grad)

    def see_skip(self, o: int, allowed: set[bool]) -> bool:
        skipped = self.scene["scaler"].last_step(self.scene[f"o{o}"]).skipped
        if skipped not in allowed:
            raise Disagreement("the step was skipped" if skipped else "the step was taken, not skipped")
        return skipped

    def count_skip(self, o: int, skipped: bool) -> None:
        """Compare the numbers of skipped steps."""
        self.skipped += skipped
        scaler = self.scene["scaler"]
        counts = scaler.skipped_steps(self.scene[f"o{o}"]), scaler.skipped_steps()
        right = self.oracle.windows[o].skipped, self.skipped
        if counts != right:
            raise Disagreement(f"skipped_steps() of o{o} and of all are {counts}, should be {right}")
