"""Makes torch.amp, Accelerate, Lightning and Fabric use amp_plugin in an unmodified program.

``amp-plugin run`` prepares a :class:`Takeover`, which starts when the program imports torch. The takeover
lasts until the process ends, because threads and ``atexit`` handlers run after the program's last line. Child
processes inherit the environment variable ``AMP_PLUGIN_TAKEOVER``. When a child process imports torch,
``amp_plugin_autoload`` reads ``AMP_PLUGIN_TAKEOVER`` and starts the takeover there too.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import util
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from amp_plugin.casting import bound_rules
from amp_plugin.casting.bound_rules import bound_autocast, is_launcher, ours_by_default
from amp_plugin.messages import OptionError, naming, only_warning
from amp_plugin.patches import replaced

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from amp_plugin.casting.rules import OpRules
    from amp_plugin.casting.rules_in_force import Pushed
    from amp_plugin.numerics.finding import Finding
    from amp_plugin.scaling.step_log import StepTotals

Precision = Literal["fp16", "bf16", "auto"]
VARIABLE: Final = "AMP_PLUGIN_TAKEOVER"
_ADAPTER: Final = "amp_plugin.adapters.accelerate"
_AS_WRITTEN: Final = "as-written"
_ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"
_NAMES: Final = (
    "torch.autocast, torch.amp.GradScaler, Accelerate's Accelerator and Lightning's Trainer and Fabric"
)


class Takeover:
    """Make a program use amp_plugin inside a ``with`` block, and print a summary at the end.

    ``torch.autocast`` blocks run on amp_plugin's kernels, and follow the op rules in the file ``rules`` if
    one is given. New scalers, Accelerators, Trainers and Fabrics are replaced by those of amp_plugin.
    ``precision`` applies if the program chooses no precision. ``page`` is the path of the run page, an HTML
    report. ``options`` maps names of scaler and plugin options to strings, which apply unless the program
    sets these options.
    """

    def __init__(
        self,
        program: str,
        *,
        precision: Precision | None = None,
        rules: Path | None = None,
        page: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._program, self._precision = program, precision
        self._rules_file, self._page, self._options = rules, page, dict(options or {})
        ranks, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_RANK", "0")
        self._rank = f" [rank {os.environ.get('RANK', local)} of {ranks}]" if ranks != "1" else ""
        # The names of the amp_plugin objects that the program made, in order.
        self._made: dict[str, None] = {}
        # True once the program has made an amp_plugin scaler, under any class name.
        self._uses_ours = False
        # True once the program has made an enabled scaler, or an Accelerator, Trainer or Fabric.
        self._scales = False
        self._uses_framework = False
        self._blocks: Counter[tuple[str, torch.dtype]] = Counter()
        # True once the program has created an autocast block that names no dtype, and so gets ``precision``.
        self._sets_dtype = False
        # The stack entry of the run's op rules, which records whether an autocast region has read them.
        self._defaults: Pushed | None = None
        self._totals: StepTotals | None = None  # None before torch is imported
        self._failed = False
        self._begun, self._undo = ExitStack(), ExitStack()

    def begin(self) -> None:
        """When torch is imported, make the program use amp_plugin until the process ends."""
        _BOUND.append(self)
        self._set_variables(self._begun)
        util.register_after_fork(self, Takeover._forked)
        self._end_with_process()
        self._begun.enter_context(when_imported({"torch": lambda _: self}))

    def program_failed(self, error: BaseException | None) -> None:
        """Record that the program ended with an error.

        If torch rejected the dtypes of an op, print advice.
        """
        self._failed = True
        if error is None or "torch" not in sys.modules:
            return
        from amp_plugin.numerics.refusals import finding_in_trace  # noqa: PLC0415 - loads torch

        with only_warning("the finding of this error", lambda: None):
            if (finding := finding_in_trace(error)) is not None:
                self._say(str(finding), in_children=True)

    def _end_with_process(self) -> None:
        """End the takeover after everything else.

        A multiprocessing finalizer ends the takeover, because child processes of multiprocessing do not run
        atexit handlers.
        """
        self.end = util.Finalize(None, self._ended, exitpriority=0)

    def _ended(self) -> None:
        error = RuntimeError(f"{self._program} failed") if self._failed else None
        self._begun.__exit__(type(error) if error else None, error, None)
        if "torch" not in sys.modules:  # the takeover never started
            self._say_what_was_used()

    def __enter__(self) -> Self:
        """Start the takeover, and print a line to announce it."""
        from amp_plugin.adapters.taken_scalers import scalers_taken  # noqa: PLC0415 - loads torch
        from amp_plugin.numerics.scaled_clips import ScaledClips  # noqa: PLC0415
        from amp_plugin.precision import DTYPES  # noqa: PLC0415
        from amp_plugin.scaling.grad_scaler import GradScaler  # noqa: PLC0415
        from amp_plugin.scaling.step_log import StepTotals, new_logs  # noqa: PLC0415

        rules = self._rules()
        self._choose()
        with ExitStack() as undo:
            self._set_variables(undo)
            if self._page is not None:
                from amp_plugin.run_page.report import program_page  # noqa: PLC0415 - loads torch

                undo.enter_context(program_page(self._page, self._program))
            self._defaults = undo.enter_context(ours_by_default())
            dtype = None if self._precision is None else DTYPES[self._precision]
            name = str(self._rules_file or "")
            self._blocks = undo.enter_context(
                bound_autocast(
                    rules, name, dtype=dtype, on_first=self._opened_first, on_default=self._note_default
                )
            )
            self._totals = StepTotals()
            undo.enter_context(new_logs(self._totals.follow))
            undo.enter_context(self._scaling_noted(GradScaler))
            undo.enter_context(scalers_taken(self._may_take, self._arguments, self._note_scaler))
            undo.enter_context(when_imported(self._frameworks()))
            undo.enter_context(ScaledClips(self._tell_of_clip))
            self._undo = undo.pop_all()
        said = f"{_NAMES} are replaced by those of amp_plugin while {self._program} runs"
        if self._precision is not None:
            said += f"; the precision is {self._precision} unless the program chooses one"
        if rules is not None:
            said += f"; torch.autocast on {rules.device_type} follows {self._rules_file}"
        self._say(said)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo the takeover, and print which of the replaced torch features the program used."""
        self._undo.__exit__(kind, error, trace)
        self._failed = self._failed or not (kind is None or issubclass(kind, SystemExit))
        self._say_what_was_used()

    def _choose(self) -> None:
        """Choose the precision for "auto" on this machine, and print the reason. This needs torch."""
        if self._precision != "auto":
            return
        from amp_plugin.hardware import auto_precision  # noqa: PLC0415 - loads torch

        choice = auto_precision()
        self._precision = None if choice.precision == "fp32" else choice.precision
        self._say(f"--precision auto is {choice.precision}: {choice.reason}")

    def _rules(self) -> OpRules | None:
        """Return the op rules of the given file.

        If the rules file cannot be used, print the error and end the process.
        """
        if self._rules_file is None:
            return None
        from amp_plugin.casting.rules import OpRules  # noqa: PLC0415 - loads torch
        from amp_plugin.kernels.build import require_native  # noqa: PLC0415 - loads torch

        try:
            rules = OpRules.from_yaml(self._rules_file)
            require_native("amp-plugin run --rules")
        except (OSError, RuntimeError, ValueError) as error:
            self._failed = True
            self._say(f"error: {error}")
            raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from error
        return rules

    def _say_what_was_used(self) -> None:
        dtypes = self._dtypes_of_blocks()
        used = [*(f"torch.autocast in {dtype}" for dtype in dtypes), *self._made]
        if used:
            self._say(f"{self._program} used {', '.join(used)}{self._told_of_steps()}", in_children=True)
        elif not self._failed:
            does = "used none of these; a plain loop needs torch.autocast(device), enabled, around its model"
            if self._uses_ours or self._opened_regions_of_ours():
                does = "uses amp_plugin itself, which needs no `amp-plugin run`"
            self._say(f"amp_plugin replaced nothing in this process: {self._program} {does}")
        if used and (why := self._why_precision_sets_nothing(dtypes)):
            self._say(f"--precision {self._precision} had no effect: {why}", in_children=True)
        if "fp16" in dtypes and not self._scales:
            self._say(
                "float16 ran without a torch.amp.GradScaler: if this was training, small gradients are lost; "
                "scale the loss by one, or use bfloat16",
                in_children=True,
            )
        self._blocks.clear()
        self._made.clear()

    def _why_precision_sets_nothing(self, dtypes: Sequence[str]) -> str:
        """Return why ``precision`` had no effect on a plain loop, or "" if it had one or was not needed.

        Args:
            dtypes: The short names of the dtypes of the autocast blocks that the program opened.
        """
        if self._precision is None or self._uses_framework or self._sets_dtype or dtypes == [self._precision]:
            return ""
        if not dtypes:
            no_block = f"{self._program} opened no block of torch.autocast, or none that is enabled"
            return f"{no_block}; nothing was computed in {self._precision}"
        return (
            f"each block of torch.autocast in {self._program} names its dtype; leave out dtype= in the "
            "blocks that --precision should set"
        )

    def _told_of_steps(self) -> str:
        """Return a string that says how many steps were taken and skipped, and gives the last loss scale.

        The string is empty if there were no steps.

        If the program has failed, do not wait for the device, because it may never respond.
        """
        told: tuple[int, int, float | None] = (0, 0, None)
        if self._totals is not None:
            with only_warning("the number of steps", lambda: None):
                told = self._totals.told(wait=not self._failed)
        steps, skipped, scale = told
        if not steps:
            return ""
        text = f"; {steps} optimizer step{'s' * (steps > 1)}, {skipped or 'none'} skipped"
        if scale is not None:
            text += f", final loss scale {scale:.10g}"
        what = ""
        if 2 * skipped > steps:
            what = "Most steps were skipped"
        elif skipped and scale is not None and scale < 1:
            what = "The loss scale fell below 1, so gradients overflow even without a loss scale"
        script = self._program if self._program.endswith(".py") else "train.py"
        return text + (f". {what}: `amp-plugin diagnose {script}` finds the reason" if what else "")

    def _dtypes_of_blocks(self) -> list[str]:
        if not self._blocks:
            return []
        from amp_plugin.precision import short_name  # noqa: PLC0415 - loads torch

        return sorted({short_name(dtype) for _, dtype in self._blocks})

    def _opened_regions_of_ours(self) -> bool:
        return self._defaults is not None and self._defaults.was_read

    def _opened_first(self, device_type: str, dtype: torch.dtype) -> None:
        """Print a warning if the first autocast block on a device uses a dtype that is slow on the device."""
        from amp_plugin.hardware import speed_advice  # noqa: PLC0415 - loads torch
        from amp_plugin.precision import short_name  # noqa: PLC0415 - loads torch

        name = short_name(dtype)
        if name == "fp16" and (advice := speed_advice(name, device_type)):
            self._say(f"{advice}; convolutions may take up to 100 times as long")

    def _forked(self) -> None:
        """Make a forked child process report only its own steps and autocast blocks, not its parent's."""
        self._blocks.clear()
        self._made.clear()
        if self._totals is not None:
            self._totals.start_over()
        self._end_with_process()

    def _set_variables(self, undo: ExitStack) -> None:
        """Set environment variables for the program and for its child processes."""
        given: dict[str, str] = {VARIABLE: self._precision or _AS_WRITTEN}
        given |= {f"AMP_PLUGIN_{name.upper()}": value for name, value in self._options.items()}
        if self._rules_file is not None:
            given["AMP_PLUGIN_RULES"] = str(self._rules_file.absolute())
        chosen = self._precision if self._precision != "auto" else None
        if chosen is not None and os.environ.get(_ACCELERATE, "no").lower() == "no":
            given[_ACCELERATE] = chosen
        undo.callback(
            os.environ.update, {name: os.environ[name] for name in given.keys() & os.environ.keys()}
        )
        for name in given:
            undo.callback(os.environ.pop, name, None)
        os.environ.update(given)

    def _scaling_noted(self, kind: Any) -> AbstractContextManager[object]:
        """Record whether the program makes amp_plugin scalers, and whether any of them is enabled."""
        original = kind.__init__

        @functools.wraps(original)
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            self._uses_ours = True
            self._scales = self._scales or scaler.is_enabled()

        return replaced(kind, "__init__", init)

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a scaler.

        Environment variables override keyword arguments that equal torch's defaults.

        Raises:
            OptionError: an option of the loss scale is wrong. The error message names the flag of
                ``amp-plugin run`` or the environment variable that sets the option.
        """
        from amp_plugin.adapters.option_sources import decided, outside_program  # noqa: PLC0415
        from amp_plugin.options import (  # noqa: PLC0415 - loads torch
            GradScalerOptions,
            LossScaleOptions,
            option_defaults,
            option_names,
        )

        defaults, names = option_defaults(GradScalerOptions), {*option_names(LossScaleOptions)}
        by_position = dict(zip(defaults, args, strict=False))
        stated = {name for name, value in {**by_position, **kwargs}.items() if value != defaults.get(name)}
        outside, sources = decided(outside_program(os.environ))
        taken = {name: outside[name] for name in outside.keys() & names - stated - by_position.keys()}
        flags = {name: f"--{name.replace('_', '-')} of amp-plugin run" for name in self._options}
        given = {**by_position, **kwargs, **taken}
        with naming({name: source for name, source in (sources | flags).items() if name in taken}):
            LossScaleOptions(**{name: given[name] for name in given.keys() & names})
        return {**kwargs, **taken}

    def _may_take(self, kind: type) -> bool:
        """Return whether a scaler class may be replaced.

        Classes that override private methods of torch's scaler are never replaced.
        """
        from amp_plugin.adapters.taken_scalers import overrides_private  # noqa: PLC0415 - loads torch

        if overrides_private(kind):
            self._say(
                f"{kind.__name__} overrides private methods of torch.amp.GradScaler, so it is not replaced"
            )
            return False
        return True

    def _frameworks(self) -> dict[str, Callable[[ModuleType], AbstractContextManager[object]]]:
        """Return a dict that maps a module's name to the context to enter once the module is imported."""
        from amp_plugin.adapters import lightning  # noqa: PLC0415

        ours = partial(lightning.plugin_in_place_of_stock, precision=self._precision, made=self._note)
        return {
            # When the program imports Accelerate, amp_plugin's adapter for Accelerate is imported too.
            # If the adapter is imported first, it imports Accelerate. install() runs once both are loaded.
            "accelerate": lambda _: nullcontext(importlib.import_module(_ADAPTER)),
            _ADAPTER: self._accelerate,
            **dict.fromkeys(lightning.CONNECTORS, ours),
        }

    def _accelerate(self, module: ModuleType) -> ExitStack:
        from amp_plugin.adapters.accelerate.installation import install, uninstall  # noqa: PLC0415

        def made(accelerator: Any) -> None:
            kind = type(accelerator).__name__.removeprefix("Amp")
            self._note(f"{kind}(mixed_precision={accelerator.mixed_precision!r})")

        install(made=made)
        undo = ExitStack()
        undo.callback(uninstall)
        return undo

    def _tell_of_clip(self, finding: Finding) -> None:
        """Print which line of the program clips gradients of a scaled loss, and how to fix it."""
        self._say(f"{finding.headline}, at {finding.caller or finding.place}: {finding.advice}")

    def _note(self, made: str) -> None:
        """Record a new Accelerator, Trainer or Fabric, which creates a scaler if it needs one."""
        self._made[made], self._scales, self._uses_framework = None, True, True

    def _note_default(self) -> None:
        self._sets_dtype = True

    def _note_scaler(self, scaler: Any) -> None:
        self._made[type(scaler).__name__ + ("" if scaler.is_enabled() else " (disabled)")] = None

    def _say(self, text: str, *, in_children: bool = False) -> None:
        """Print a line. Child processes, such as DataLoader workers, print only their summary."""
        # While a spawned child imports the main module, ``parent_process()`` is still None.
        is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
        if not in_children and (is_importing or multiprocessing.parent_process() is not None):
            return
        print(f"amp-plugin run{self._rank}: {text}", file=sys.stderr, flush=True)


@contextmanager
def when_imported(
    actions: Mapping[str, Callable[[ModuleType], AbstractContextManager[object]]],
) -> Iterator[None]:
    """Enter each module's context when the module is imported, or at once if it was imported before.

    All contexts are exited at the end.
    """
    with ExitStack() as undo:

        def act(module: ModuleType) -> None:
            undo.enter_context(actions[module.__name__](module))

        finder = _finder(actions.keys(), act)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        for name in [name for name in actions if name in sys.modules]:  # an action may import further modules
            act(sys.modules[name])
        yield


def _finder(names: Collection[str], act: Callable[[ModuleType], None]) -> Any:
    """Return an import finder that calls ``act`` with each module in ``names`` after its code has run."""

    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in names:
            return None
        others = [other.find_spec for other in sys.meta_path if other is not finder]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                act(module)

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    return finder


# -- processes that a program starts ---

_BOUND: Final[list[Takeover]] = []  # the takeover of the whole process


def end_runs() -> None:
    """End the takeover of this process now, instead of when the process ends."""
    while _BOUND:
        _BOUND.pop().end()


def bind_environment() -> None:
    """Read ``AMP_PLUGIN_RULES`` and ``AMP_PLUGIN_TAKEOVER``, and apply them to this process.

    ``import torch`` calls this function.

    ``AMP_PLUGIN_RULES`` names a file of op rules. ``AMP_PLUGIN_TAKEOVER`` makes the program use amp_plugin
    instead of torch.amp. ``amp-plugin run`` sets ``AMP_PLUGIN_TAKEOVER`` for the child processes of its
    program.

    Raises:
        OptionError: ``AMP_PLUGIN_RULES`` or ``AMP_PLUGIN_TAKEOVER`` has an invalid value. The error names the
            variable.
    """
    if _BOUND or is_launcher():
        return
    bound_rules.bind_environment()
    given: Any = os.environ.get(VARIABLE, "")
    if not given:
        return
    known = (*get_args(Precision), _AS_WRITTEN)
    if given not in known:
        allowed = f"allowed are {', '.join(known)}"
        text = f"{VARIABLE}={given} is unknown; {allowed}; amp-plugin run sets it, unset it"
        raise OptionError(VARIABLE, given, allowed, text)
    name = Path(sys.argv[0]).name.removeprefix("-c")  # a fork server's argv[0] is "-c"
    Takeover(name or "this process", precision=None if given == _AS_WRITTEN else given).begin()
