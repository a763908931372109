"""A program that is not edited, on amp_plugin: torch.amp's names, Accelerate and Lightning while it runs.

``amp-plugin run`` opens a :class:`Takeover` around the program. It tells the processes that the program
starts by ``AMP_PLUGIN_TAKEOVER``, which torch reads when they import it (the entry point ``torch.backends``).
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from amp_plugin.casting.bound_rules import bound_autocast, is_launcher, ours_by_default
from amp_plugin.patches import replaced, standing_in

if TYPE_CHECKING:
    from typing_extensions import Self

    from amp_plugin.casting.rules import OpRules
    from amp_plugin.numerics.finding import Finding

Precision = Literal["fp16", "bf16"]
VARIABLE: Final = "AMP_PLUGIN_TAKEOVER"
_ADAPTER: Final = "amp_plugin.adapters.accelerate"
_AS_WRITTEN: Final = "as-written"
_ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"
_NAMES: Final = (
    "torch.autocast, torch.amp.GradScaler, Accelerate's Accelerator and Lightning's Trainer and Fabric"
)


class Takeover:
    """Let a program compute by amp_plugin while the region is open, and say what it used.

    Blocks of ``torch.autocast`` follow our kernels, and ``rules`` on their device. Scalers, Accelerators,
    Trainers and Fabrics become ours when they are made, in ``precision`` where the program chooses none.
    """

    def __init__(
        self,
        program: str,
        *,
        precision: Precision | None = None,
        rules: OpRules | None = None,
        rules_name: str = "",
    ) -> None:
        self._program, self._precision = program, precision
        self._rules, self._rules_name = rules, rules_name
        ranks, local = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_RANK", "0")
        self._rank = f" [rank {os.environ.get('RANK', local)} of {ranks}]" if ranks != "1" else ""
        self._made: dict[str, None] = {}  # what the program made of ours, in order
        self._uses_ours = False  # a scaler of ours was made, by whatever name
        self._scales = False  # a scaler that is enabled was made, or a framework that sees to it
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Take the names over, and say so."""
        import torch  # noqa: PLC0415 - takes seconds

        from amp_plugin.casting.installed_kernels import KERNELS  # noqa: PLC0415 - loads torch
        from amp_plugin.numerics.scaled_clips import ScaledClips  # noqa: PLC0415
        from amp_plugin.precision import DTYPES  # noqa: PLC0415
        from amp_plugin.scaling.grad_scaler import GradScaler  # noqa: PLC0415

        self._asked = len(KERNELS.asked)
        with ExitStack() as undo:
            self._set_variables(undo)
            undo.enter_context(ours_by_default())
            dtype = None if self._precision is None else DTYPES[self._precision]
            self._blocks = undo.enter_context(bound_autocast(self._rules, self._rules_name, dtype=dtype))
            undo.enter_context(self._scaling_noted(GradScaler))
            undo.enter_context(
                standing_in(
                    GradScaler,
                    torch.amp.GradScaler,
                    may_take=self._may_take,
                    arguments=_with_environment,
                    made=lambda scaler: self._made.setdefault(type(scaler).__name__),
                )
            )
            undo.enter_context(when_imported(self._frameworks()))
            undo.enter_context(ScaledClips(self._tell_of_clip))
            self._undo = undo.pop_all()
        util.register_after_fork(self, Takeover._forked)
        said = f"{_NAMES} are amp_plugin's while {self._program} runs"
        if self._precision is not None:
            said += f", in {self._precision} where it chooses no precision"
        if self._rules is not None:
            said += f"; torch.autocast on {self._rules.device_type} follows {self._rules_name}"
        self._say(said)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Give all back, and say what the program used."""
        from amp_plugin.casting.installed_kernels import KERNELS  # noqa: PLC0415 - loads torch
        from amp_plugin.precision import short_name  # noqa: PLC0415

        self._undo.close()
        dtypes = sorted({short_name(dtype) for _, dtype in self._blocks})
        used = [*(f"torch.autocast in {dtype}" for dtype in dtypes), *self._made]
        if used:
            self._say(f"{self._program} used {', '.join(used)}", in_children=True)
        elif kind is None or issubclass(kind, SystemExit):
            does = "used none of these; a plain loop needs torch.autocast(device), enabled, around its model"
            if self._uses_ours or len(KERNELS.asked) > self._asked:
                does = "uses amp_plugin itself, which needs no `amp-plugin run`"
            self._say(f"nothing was taken over in this process: {self._program} {does}")
        if "fp16" in dtypes and not self._scales:
            self._say(
                "float16 ran without a torch.amp.GradScaler: if this was training, small gradients are lost; "
                "scale the loss by one, or use bfloat16",
                in_children=True,
            )
        self._blocks.clear()
        self._made.clear()

    def _forked(self) -> None:
        """Let a child that multiprocessing forks say what it used itself."""
        self._blocks.clear()
        self._made.clear()
        self.ends_with_process()

    def ends_with_process(self) -> None:
        """Exit when the process ends; children of multiprocessing run none of the handlers of atexit."""
        util.Finalize(None, self.__exit__, (None,), exitpriority=0)

    def _set_variables(self, undo: ExitStack) -> None:
        """Set the variables of the program and of the processes that it starts."""
        given: dict[str, str] = {VARIABLE: self._precision or _AS_WRITTEN}
        if self._rules_name:
            given["AMP_PLUGIN_RULES"] = os.path.abspath(self._rules_name)  # noqa: PTH100 - links are the user's
        if self._precision is not None and os.environ.get(_ACCELERATE, "no").lower() == "no":
            given[_ACCELERATE] = self._precision
        undo.callback(
            os.environ.update, {name: os.environ[name] for name in given.keys() & os.environ.keys()}
        )
        for name in given:
            undo.callback(os.environ.pop, name, None)
        os.environ.update(given)

    def _scaling_noted(self, kind: Any) -> AbstractContextManager[object]:
        """Note whether a scaler of ours that scales is made, by whatever name."""
        original = kind.__init__

        @functools.wraps(original)
        def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            self._uses_ours = True
            self._scales = self._scales or scaler.is_enabled()

        return replaced(kind, "__init__", init)

    def _may_take(self, kind: type) -> bool:
        """Whether a class of scalers is to be ours: none that overrides torch's private steps, as FSDP1's."""
        import torch  # noqa: PLC0415

        torchs = torch.amp.GradScaler
        inner = [name for name in vars(torchs) if name.startswith("_") and not name.startswith("__")]
        if any(getattr(kind, name) is not getattr(torchs, name) for name in inner):
            self._say(f"{kind.__name__} overrides torch's own steps of a loss scale and is left as it is")
            return False
        return True

    def _frameworks(self) -> dict[str, Callable[[ModuleType], AbstractContextManager[object]]]:
        """Return module -> what to enter once it is imported."""
        from amp_plugin.adapters import lightning  # noqa: PLC0415

        ours = partial(lightning.plugin_in_place_of_stock, precision=self._precision, made=self._note)
        return {
            # our adapter is loaded, unless it is what imports Accelerate: it is installed once it has run
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
        """Name the line that clips gradients of a scaled loss, with its cure."""
        self._say(f"{finding.headline}, at {finding.caller or finding.place}: {finding.advice}")

    def _note(self, made: str) -> None:
        """Note an Accelerator, Trainer or Fabric, which scales where it has to."""
        self._made[made], self._scales = None, True

    def _say(self, text: str, *, in_children: bool = False) -> None:
        """Print a line; children of multiprocessing, a loader's workers for instance, say what they used."""
        # a spawned one has no parent yet while it imports the main module
        is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
        if not in_children and (is_importing or multiprocessing.parent_process() is not None):
            return
        print(f"amp-plugin run{self._rank}: {text}", file=sys.stderr, flush=True)


def _with_environment(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a scaler, with options of the environment where they are torch's defaults."""
    from amp_plugin.adapters.option_sources import decided, outside_program  # noqa: PLC0415
    from amp_plugin.options import GradScalerOptions, LossScaleOptions, option_defaults, option_names  # noqa: PLC0415

    defaults = option_defaults(GradScalerOptions)
    by_position = dict(zip(defaults, args, strict=False))
    stated = {name for name, value in {**by_position, **kwargs}.items() if value != defaults.get(name)}
    outside, _ = decided(outside_program(os.environ))
    left_open = {*option_names(LossScaleOptions)} - stated - by_position.keys()
    return {**kwargs, **{name: value for name, value in outside.items() if name in left_open}}


@contextmanager
def when_imported(
    actions: Mapping[str, Callable[[ModuleType], AbstractContextManager[object]]],
) -> Iterator[None]:
    """Enter what is to stand around modules as each is imported, or now if it is; leave all at the end."""
    with ExitStack() as undo:

        def act(module: ModuleType) -> None:
            undo.enter_context(actions[module.__name__](module))

        finder = _Finder(actions.keys(), act)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        for name in [name for name in actions if name in sys.modules]:  # acting imports others
            act(sys.modules[name])
        yield


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and acts on some of them when they have run."""

    def __init__(self, names: Any, act: Callable[[ModuleType], None]) -> None:
        self._names, self._act = names, act

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self._act(module)

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


# -- processes that a program starts --------------------------------------------------------------

_BOUND: Final[list[Takeover]] = []  # that of the whole process, once


def bind_environment() -> None:
    """Take over what ``AMP_PLUGIN_TAKEOVER`` says, for the whole process; ``import torch`` calls it."""
    given = os.environ.get(VARIABLE, "")
    if not given or _BOUND or is_launcher():
        return
    known = (*get_args(Precision), _AS_WRITTEN)
    if given not in known:
        allowed = f"allowed are {', '.join(known)}"
        msg = f"{VARIABLE}={given} is unknown; {allowed}; amp-plugin run sets it, unset it"
        raise ValueError(msg)
    precision: Any = None if given == _AS_WRITTEN else given
    name = Path(sys.argv[0]).name.removeprefix("-c")  # that of a fork server
    takeover = Takeover(name or "this process", precision=precision)
    _BOUND.append(takeover)  # alive when a fork server forks
    takeover.__enter__()
    takeover.ends_with_process()
