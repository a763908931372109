"""How the weights and modules of a model are set up before Accelerate wraps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from amp_plugin.adapters.float8 import leave_out
from amp_plugin.adapters.model_weights import ModelWeights
from amp_plugin.casting.run_in import apply_fp32_modules
from amp_plugin.patterns import found_patterns, require_matches


class Preparation:
    """Store the weights of models as asked, and put the modules that ``fp32_modules`` names under fp32.

    Args:
        weights: stores them.
        fp32_modules: names and classes of modules; each is to be found in one of the models, not in all.
        float8_recipe: Accelerate's, which must leave those modules alone; None without fp8.
    """

    def __init__(self, weights: ModelWeights, fp32_modules: Sequence[str], float8_recipe: Any) -> None:
        self._weights = weights
        self._wanted = fp32_modules
        self._found: set[str] = set()
        self._float8_recipe = float8_recipe

    def set_up(self, models: Sequence[nn.Module], *, trained: bool = True) -> None:
        """Set models up, before they are wrapped or moved; changes them in place.

        Args:
            models: the models that are prepared together.
            trained: whether they are prepared for training; otherwise weights are left as they are.

        Raises:
            ValueError: a name of ``fp32_modules`` is of no module in them, nor in those set up before.
        """
        matched = {model: found_patterns(model, self._wanted) for model in models}
        if trained:
            for model, patterns in matched.items():
                self._weights.set_up(model, patterns)
        self._found.update(*matched.values())
        if models:
            require_matches(models, [name for name in self._wanted if name not in self._found])
        for model, patterns in matched.items():
            names = apply_fp32_modules(model, patterns)
            if names and self._float8_recipe is not None:
                leave_out(self._float8_recipe, model, names)

    @contextmanager
    def is_over(self) -> Iterator[None]:
        """Look for no names within the block, where Accelerate prepares the models one by one."""
        wanted, self._wanted = self._wanted, ()
        try:
            yield
        finally:
            self._wanted = wanted
