"""IgnitePrecision: mixed precision for pytorch-ignite engines.

Ignite's own mixed precision is an update function that uses a GradScaler. IgnitePrecision also clips
gradients, stores weights in 16 bits, follows op rules and saves the loss scale in checkpoints.
IgnitePrecision also holds back schedulers after skipped steps, and passes metrics to ignite's loggers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, cast

import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.utils import apply_to_tensor, convert_tensor
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Doc

from amp_plugin.adapters.option_sources import resolved
from amp_plugin.adapters.scaler import scaler_groups
from amp_plugin.adapters.session import EntryPoint
from amp_plugin.messages import warn_user
from amp_plugin.options import PluginOptions, RunOptions, between, lists_options, takes, whole
from amp_plugin.scaling.step_log import StepResult
from amp_plugin.scaling.words import Words
from amp_plugin.weights.ddp import refuse_sharded, sharded_by
from amp_plugin.weights.formats import HALVES


@dataclass(frozen=True, kw_only=True)
class IgniteOptions(PluginOptions, RunOptions):
    """The arguments of IgnitePrecision."""

    max_norm: Annotated[float | None, Doc("The largest total norm of the gradients. None does not clip.")] = (
        None
    )
    gradient_accumulation_steps: Annotated[int, Doc("The number of micro-batches of one optimizer step.")] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.max_norm is not None:
            between("max_norm", self.max_norm, 0)


@lists_options(IgniteOptions)
class IgnitePrecision(EntryPoint):
    """Mixed precision for pytorch-ignite trainers and evaluators.

    After each optimizer step, ``engine.state.metrics`` contains ``loss_scale``, ``skipped_steps`` and
    ``grad_norm``, for any logger or progress bar. To save the loss scale, add the IgnitePrecision object to a
    ``Checkpoint``, as in ``dict(model=model, optimizer=optimizer, trainer=trainer, amp=amp)``. If the engine
    raises, call :meth:`end`.

    Args:
        {options}

    Raises:
        OptionError: an argument is not one of the allowed values.

    Example:
        >>> import torch
        >>> amp = IgnitePrecision("fp16", init_scale=1024.0, max_norm=1.0)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = amp.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
        >>> _ = trainer.run([(torch.ones(2, 4), torch.ones(2, 1))], max_epochs=3)
        >>> amp.last_step(optimizer).skipped, trainer.state.metrics["skipped_steps"]
        (False, 0)
    """

    words = Words(
        backward="amp.backward(loss)",
        unscale="amp.scaler.unscale_(optimizer)",
        step="amp.step(optimizer)",
        prepare="amp.attach(engine, model, optimizer)",
        bf16="use IgnitePrecision('bf16')",
        endless="IgnitePrecision(max_skips_in_a_row=...)",
        reduce="model.register_comm_hook(None, bf16_compress_hook)",
    )

    @takes(IgniteOptions, by_position=1)
    def __init__(self, **given: Any) -> None:
        options, sources = resolved(IgniteOptions, [("argument", given)], os.environ, door="ignite")
        self.skipped_steps = 0
        self._open_session(options, str(options.precision), sources=sources)
        if options.scaler is not None:
            self.session.replace_scaler(options.scaler, "IgnitePrecision(scaler=...)")

    @property
    def options(self) -> IgniteOptions:
        """The options, checked."""
        return cast("IgniteOptions", self.session.options)

    @property
    def scaler(self) -> Any:
        """The ``amp_plugin.GradScaler`` in fp16, otherwise None."""
        return self.session.shown_scaler

    # -- engines ---------------------------

    def create_supervised_trainer(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Tensor],
        device: Any = None,
        *,
        prepare_batch: Callable[..., tuple[Any, Any]] | None = None,
        output_transform: Callable[[Any, Any, Any, Tensor], Any] = lambda *parts: parts[-1].item(),
    ) -> Engine:
        """Return a trainer like ``ignite.engine.create_supervised_trainer``, but in mixed precision.

        Args:
            model: the model to train. It is not moved to another device.
            optimizer: the optimizer of its parameters.
            loss_fn: a function of the model's output and the targets. It runs under autocast.
            device: the device to which batches are moved.
            prepare_batch: a function that returns the inputs and the targets of a batch, as in ignite.
            output_transform: a function that takes the inputs, the targets, the model's output and the loss.
                It returns the engine's output.
        """
        prepare, every = prepare_batch or convert_tensor, self.options.gradient_accumulation_steps

        def update(engine: Engine, batch: Any) -> Any:
            iteration = engine.state.iteration
            if (iteration - 1) % every == 0:
                optimizer.zero_grad()
            model.train()
            x, y = cast("tuple[Any, Any]", prepare(batch, device=device, non_blocking=False))
            with self.session.region():
                y_pred = self.model_fn(model, x)
                loss = loss_fn(y_pred, y)
            self.backward(loss / every)
            if iteration % every == 0:
                self.step(optimizer)
            return output_transform(x, y, y_pred, loss)

        trainer = Engine(update)
        self.attach(trainer, model, optimizer)
        return trainer

    def attach(self, engine: Engine, model: nn.Module, optimizer: Optimizer) -> None:
        """Make an ignite engine train in mixed precision during each of its runs.

        The engine's update function must call :meth:`backward` and :meth:`step`.
        """
        engine.add_event_handler(Events.STARTED, self._on_started, model, optimizer)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration, optimizer)
        engine.add_event_handler(Events.COMPLETED | Events.TERMINATE, self.end)

    def _on_started(self, engine: Engine, model: nn.Module, optimizer: Optimizer) -> None:
        session, options = self.session, self.options
        refuse_sharded(options.weights, sharded_by(model))
        session.set_up_weights(model, options.fp32_modules)
        session.begin(_device(model), scaler_groups(model), is_first_rank=idist.get_rank() == 0)
        session.convert(model)
        session.check_shards(model)
        session.add([model], [optimizer], [model])
        self.skipped_steps = self._scaler.skipped_steps()
        self.step_log.subscribe(self._count)
        if options.report is not None:
            session.watch([model], options.report)

    def _count(self, step: StepResult) -> None:
        self.skipped_steps += step.skipped

    def _on_iteration(self, engine: Engine, optimizer: Optimizer) -> None:
        """Add the results of the last step to the engine's metrics, without a host sync."""
        result, scale = self.result_of(optimizer), self._scaler.loss_scale.value
        if result is not None:
            shown = {
                "loss_scale": None if scale is None else scale.clone(),
                "grad_norm": result.norm,
                "skipped_steps": self.skipped_steps,
            }
            engine.state.metrics |= {name: value for name, value in shown.items() if value is not None}

    def end(self, *_: Any) -> None:
        """End the run.

        Weights are converted back to float32, and the op rules from before the run are restored.
        """
        self.session.end(warn=warn_user)
        self.step_log.unsubscribe(self._count)

    # -- one step --------------------------

    def model_fn(self, model: nn.Module, x: Any) -> Any:
        """Run a model in the training or evaluation precision, depending on the model's mode.

        In evaluation mode the outputs are float32. To evaluate, pass this method as the argument
        ``model_fn``, as in ``ignite.engine.create_supervised_evaluator(model, model_fn=amp.model_fn)``.
        """
        session = self.session
        if session.replaces_autocast and model in session.models:
            dtype = session.training_dtype
            x = apply_to_tensor(x, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        if model.training:
            return model(x)
        if not session.device:
            session.begin(_device(model))
        with session.region(session.eval_precision):
            output = model(x)
        return apply_to_tensor(output, lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)

    def region(self) -> AbstractContextManager[Any]:
        """Return the autocast region of the training precision, for use in a custom update function."""
        return self.session.region()

    def backward(self, loss: Tensor) -> None:
        """Scale a loss and run backward."""
        with self.session.watching(self.session.models):
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> Any:
        """Unscale gradients, clip them to ``max_norm``, then take or skip the optimizer step."""
        if self.options.max_norm is not None:
            self._scaler.clip_grad_norm_(optimizer, self.options.max_norm)
        return self.session.step(optimizer)

    def step_scheduler(self, scheduler: Any, *args: Any) -> bool:
        """Step a scheduler unless its optimizer's step was skipped.

        Return True if the scheduler was stepped.
        """
        return self.session.step_scheduler(scheduler, *args)

    # -- checkpoints -----------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale, with the keys of torch's GradScaler.

        The state is empty if no loss is scaled.
        """
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a loss scale, as saved by amp_plugin or by torch's GradScaler.

        Warn if this run does not use a loss scale.
        """
        if told := self.session.load_state_dict(state_dict):
            warn_user(f"IgnitePrecision: {told}")


def _device(model: nn.Module) -> str:
    return next(model.parameters()).device.type
