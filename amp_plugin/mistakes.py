"""Describes known mixed-precision mistakes, for checks and error messages.

``amp-plugin check`` finds these mistakes in source code. Errors and warnings that are raised at run time take
their wording from this file, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """The texts about one mistake.

    Attributes:
        name: a short name of the mistake, which is also the anchor of its section in the docs.
        what: what is wrong, worded as a statement about the program.
        instead: what to do instead, worded in the imperative.
        is_harmless: True if training stays correct, so that reports show a warning instead of an error.
    """

    name: str
    what: str
    instead: str
    is_harmless: bool = False

    def instead_with(self, scaler: str, optimizer: str) -> str:
        """Return what to do instead, with the program's own variable names for scaler and optimizer."""
        names = {"scaler": scaler, "optimizer": optimizer}
        return re.sub(r"\b(scaler|optimizer)\b", lambda found: names[found[0]], self.instead)


MISTAKES: Final = {
    "AMP001": Mistake(
        name="clip-before-unscale",
        what="the gradients are clipped while they are multiplied by the loss scale",
        instead="call scaler.unscale_(optimizer) before the clip",
    ),
    "AMP002": Mistake(
        name="step-past-scaler",
        what="step() is called past the scaler, with gradients that are multiplied by the loss scale",
        instead="call scaler.step(optimizer)",
    ),
    "AMP003": Mistake(
        name="framework-bypassed",
        what="the framework scales the loss, but this call bypasses the framework",
        instead="call the method of the framework",
    ),
    "AMP004": Mistake(
        name="no-update",
        what="the scaler steps and is never updated, so the loss scale never changes",
        instead="call scaler.update() once per iteration, after the last step",
    ),
    "AMP005": Mistake(
        name="update-between-steps",
        what="the scaler is updated between the backward pass and a step, so the step divides by another "
        "scale",
        instead="call scaler.update() once per iteration, after the last step",
    ),
    "AMP006": Mistake(
        name="update-in-accumulation",
        what="the scaler steps or updates at other micro-batches than it should",
        instead="call scaler.step() and scaler.update() together, after the last micro-batch",
    ),
    "AMP007": Mistake(
        name="unscale-twice",
        what="unscale_() is called a second time, or after step(), since the last update()",
        instead="call unscale_() once, between backward() and step()",
    ),
    "AMP008": Mistake(
        name="backward-in-autocast",
        what="the backward pass runs inside the autocast region",
        instead="close the region before backward(), whose ops use the dtypes of the forward pass anyway",
        is_harmless=True,
    ),
    "AMP009": Mistake(
        name="bce-in-autocast",
        what="binary_cross_entropy and BCELoss raise an error inside autocast",
        instead="use binary_cross_entropy_with_logits or BCEWithLogitsLoss on the logits",
    ),
    "AMP010": Mistake(
        name="half-weights-trained",
        what="the optimizer trains weights that were converted to 16 bits, which lose small updates",
        instead="keep parameters in float32 and let autocast cast them",
    ),
    "AMP011": Mistake(
        name="fp16-without-scaler",
        what="without a loss scale, float16 gradients below 6e-8 become 0",
        instead="scale the loss with a GradScaler, or use bfloat16",
    ),
    "AMP012": Mistake(
        name="scaler-with-bf16",
        what="a loss scale with bfloat16, which has the range of float32, only costs time",
        instead="leave the scaler out, or pass enabled=False",
        is_harmless=True,
    ),
    "AMP013": Mistake(
        name="deprecated-name",
        what="torch.cuda.amp and torch.cpu.amp are deprecated",
        instead="use torch.amp with the device's name, as --fix does",
        is_harmless=True,
    ),
    "AMP014": Mistake(
        name="constant-out-of-range",
        what="float16 cannot hold this number",
        instead="compute in float32 here: call float() first",
    ),
    "AMP015": Mistake(
        name="scaler-not-saved",
        what="the checkpoint contains the optimizer but not the scaler",
        instead="save scaler.state_dict() too; otherwise a resumed run starts with a scale that overflows",
        is_harmless=True,
    ),
    "AMP016": Mistake(
        name="scheduler-on-skip",
        what="the learning rate scheduler advances although the scaler may have skipped the step",
        instead="step the scheduler only if the step was taken: if scaler.get_scale() has not decreased",
        is_harmless=True,
    ),
    "AMP017": Mistake(
        name="autocast-over-threads",
        what="a thread does not inherit the autocast region that is open around its start",
        instead="open the region in the function that the thread runs",
    ),
    "AMP018": Mistake(
        name="function-without-custom-fwd",
        what="the autograd function computes in autocast's dtype in its forward and not in its backward",
        instead="decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd",
    ),
    "AMP019": Mistake(
        name="cuda-scaler-on-cpu",
        what="the scaler is for CUDA and the regions are on the CPU; without CUDA it is disabled",
        instead="pass device='cpu'",
    ),
}
"""Maps the code of a rule in ``amp-plugin check`` to the mistake."""
