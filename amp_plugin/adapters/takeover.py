"""A program that is not edited, on amp_plugin: torch.amp's names, Accelerate and Lightning while it runs.

``amp-plugin run`` opens a :class:`Takeover` around the program. It tells the processes that the program
starts by ``AMP_PLUGIN_TAKEOVER``, which torch reads when they import it (the entry point ``torch.backends``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from amp_plugin.adapters.stand_in import standing_in
from amp_plugin.casting.bound_rules import bound_autocast, is_launcher, ours_by_default, replaced

if TYPE_CHECKING:
    from typing_extensions import Self

    from amp_plugin.casting.rules import OpRules

Precision = Literal["fp16", "bf16"]
VARIABLE: Final = "AMP_PLUGIN_TAKEOVER"
_ADAPTER: Final = "amp_plugin.adapters.accelerate"
_AS_WRITTEN: Final = "as-written"
_PRECISIONS: Final = ("fp16", "bf16")
_ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"
_NAMES: Final = (
    "torch.autocast, torch.amp.GradScaler, Accelerate's Accelerator and Lightning's Trainer and Fabric"
)


class Takeover:
    """Let a program compute by amp_plugin while the region is open, and say what it used.

    ``torch.autocast`` keeps its name: its blocks follow our kernels. A ``torch.amp.GradScaler`` that is
    made, or one of torch.cuda.amp, torch.cpu.amp or of a subclass, is ours too. Accelerators are
    AmpAccelerators, and Trainers and Fabrics that ask for mixed precision get our plugins. Leaving gives
    all of it back.

    Args:
        program: its name, for the log.
        precision: what the program gets where it chooses none: the dtype of autocast blocks without one,
            ``mixed_precision`` of an Accelerator, ``precision`` of a Trainer or Fabric in place of 32.
        rules: op rules that autocast follows on their device.
        rules_name: of their file.

    Raises:
        ValueError: the environment asks Accelerate for another precision.
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
        self._environment = self._variables()
        self._rank = _rank(os.environ)
        self._asked: Counter[str] = Counter()  # what the program made, in the precision it chose
        self._set: Counter[str] = Counter()  # what got the precision of ours
        self._left: set[str] = set()  # classes of scalers that stayed torch's
        self._scales = self._has_own = False  # a scaler of ours scales; something of ours was made
        self._names_before = _loaded_names()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Take the names over, and say so."""
        import torch  # noqa: PLC0415 - takes seconds

        from amp_plugin.precision import DTYPES  # noqa: PLC0415 - loads torch
        from amp_plugin.scaling.grad_scaler import GradScaler  # noqa: PLC0415

        with ExitStack() as undo:
            undo.enter_context(_set(self._environment))
            undo.enter_context(ours_by_default())
            dtype = None if self._precision is None else DTYPES[self._precision]
            self._blocks = undo.enter_context(bound_autocast(self._rules, self._rules_name, dtype=dtype))
            undo.enter_context(self._noting(GradScaler))
            undo.enter_context(
                standing_in(
                    GradScaler,
                    torch.amp.GradScaler,
                    may_take=self._may_take,
                    arguments=_with_environment,
                    made=lambda scaler: self._asked.update([type(scaler).__name__]),
                )
            )
            undo.enter_context(when_imported(self._frameworks()))
            self._undo = undo.pop_all()
        self._say(self._beginning())
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Give all back, and say what the program used."""
        self._undo.close()
        self._sum_up(is_over=kind is None or issubclass(kind, SystemExit))

    def _variables(self) -> dict[str, str]:
        """Return the variables of the program and of the processes that it starts."""
        given: dict[str, str] = {VARIABLE: self._precision or _AS_WRITTEN}
        if self._rules_name:
            given["AMP_PLUGIN_RULES"] = os.path.abspath(self._rules_name)  # noqa: PTH100 - links are the user's
        if self._precision is not None:
            launched = os.environ.get(_ACCELERATE, "no").lower()
            if launched not in {"no", self._precision}:
                msg = (
                    f"--precision {self._precision} and {_ACCELERATE}={launched} (accelerate launch "
                    f"--mixed_precision {launched} sets it) ask for two precisions; leave one of them out"
                )
                raise ValueError(msg)
            given[_ACCELERATE] = self._precision
        return given

    def _may_take(self, kind: type) -> bool:
        """Whether a class of scalers is to be ours: none that overrides torch's private steps, as FSDP1's."""
        import torch  # noqa: PLC0415

        torchs = torch.amp.GradScaler
        own = [base for base in kind.__mro__ if base is not torchs and issubclass(base, torchs)]
        inner = {name for name in vars(torchs) if name.startswith("_") and not name.startswith("__")}
        if any(inner & vars(base).keys() for base in own):
            self._left.add(kind.__name__)
            return False
        return True

    def _noting(self, kind: Any) -> AbstractContextManager[object]:
        """Note each instance of a class of ours, by whatever name it is made; and whether a scaler scales."""
        original = kind.__init__

        @functools.wraps(original)
        def init(made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            self._has_own = True
            self._scales = self._scales or (hasattr(made, "is_enabled") and made.is_enabled())

        return replaced(kind, "__init__", init)

    def _frameworks(self) -> dict[str, Callable[[ModuleType], AbstractContextManager[object]]]:
        """Return module -> what to enter once it is imported."""
        from amp_plugin.adapters.lightning.installation import CONNECTORS  # noqa: PLC0415 - torch is loaded

        return {
            "accelerate": _load_adapter,
            _ADAPTER: self._accelerate,
            "amp_plugin.adapters.lightning.precision_core": lambda core: self._noting(core.PrecisionCore),
            **dict.fromkeys(CONNECTORS, self._lightning),
        }

    @contextmanager
    def _accelerate(self, module: ModuleType) -> Iterator[None]:
        from amp_plugin.adapters.accelerate.installation import install, uninstall  # noqa: PLC0415

        def made(accelerator: Any) -> None:
            chosen = accelerator.mixed_precision
            used = self._set if chosen == self._precision else self._asked
            used[f"{type(accelerator).__name__.removeprefix('Amp')}(mixed_precision={chosen!r})"] += 1

        install(made=made)
        try:
            yield
        finally:
            uninstall()

    def _lightning(self, module: ModuleType) -> AbstractContextManager[object]:
        from amp_plugin.adapters.lightning.installation import plugin_in_place_of_stock  # noqa: PLC0415

        def made(shown: str, by_program: bool) -> None:
            (self._asked if by_program else self._set)[shown] += 1

        return plugin_in_place_of_stock(module, self._precision, made)

    # -- what is said ------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if multiprocessing.parent_process() is not None:  # a worker of a loader, for instance
            return
        print(f"amp-plugin run{self._rank}: {text}", file=sys.stderr, flush=True)

    def _beginning(self) -> str:
        parts = [f"{_NAMES} are amp_plugin's while {self._program} runs"]
        if self._rules is not None:
            parts.append(f"torch.autocast on {self._rules.device_type} follows {self._rules_name}")
        if self._precision is not None:
            from amp_plugin.precision import STOCK_NAMES, TRAINING_DTYPES  # noqa: PLC0415 - loads torch

            dtype, stock = TRAINING_DTYPES[self._precision], STOCK_NAMES[self._precision]
            parts.append(
                f"where it chooses no precision, --precision sets torch.autocast(dtype={dtype}), "
                f"Accelerator(mixed_precision={self._precision!r}), Trainer and Fabric(precision={stock!r})"
            )
        return "; ".join(parts)

    def _sum_up(self, *, is_over: bool) -> None:
        """Say what the program used, and what of that the precision has set."""
        blocks = [
            f"torch.autocast on {device} in {str(dtype).removeprefix('torch.')} ({count} blocks)"
            for (device, dtype), count in sorted(self._blocks.items(), key=str)
        ]
        by_us = [f"{name} by --precision" for name in _counted(self._set)]
        used = [*blocks, *_counted(self._asked), *by_us]
        if used or is_over:
            self._say(f"{self._program} used {', '.join(used)}" if used else self._unused())
        for kind in sorted(self._left):
            self._say(f"{kind} overrides torch's own steps of a loss scale and was left as it is")
        for warning in self._warnings(is_used=bool(used)):
            self._say(warning)

    def _unused(self) -> str:
        if self._has_own or _loaded_names() - self._names_before:
            text = f"{self._program} uses amp_plugin itself: nothing else was to be taken over"
            return (
                text if self._precision is None else f"{text}, and --precision {self._precision} set nothing"
            )
        text = f"{self._program} used none of them and ran as without amp-plugin"
        if self._precision is not None:
            text += "; in a plain loop, open torch.autocast(device) around the forward pass"
        return text

    def _warnings(self, *, is_used: bool) -> Iterator[str]:
        import torch  # noqa: PLC0415

        dtypes = {dtype for _, dtype in self._blocks}
        chosen = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._precision or "")
        if is_used and chosen is not None and not self._set and chosen not in dtypes:
            its_own = f"{self._program} chooses its own, change it there"
            yield f"--precision {self._precision} set nothing: {its_own}"
        in_frameworks = any("(" in name for name in (*self._asked, *self._set))
        if torch.float16 in dtypes and not self._scales and not in_frameworks:
            yield (
                "blocks in float16 ran without an enabled GradScaler: if this was training, small gradients "
                "are lost; scale the loss by a torch.amp.GradScaler, or use bfloat16"
            )


def _with_environment(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a scaler, with options of the environment where they are torch's defaults."""
    from amp_plugin.adapters.option_sources import decided, outside_program, read_all  # noqa: PLC0415
    from amp_plugin.options import GradScalerOptions, ScalingOptions, option_defaults, option_names  # noqa: PLC0415

    defaults = option_defaults(GradScalerOptions)
    by_position = dict(zip(defaults, args, strict=False))
    stated = {name for name, value in {**by_position, **kwargs}.items() if value != defaults.get(name)}
    outside, _ = decided(outside_program(os.environ))
    left_open = {*option_names(ScalingOptions)} - stated - by_position.keys()
    return {**kwargs, **read_all({name: value for name, value in outside.items() if name in left_open})}


def _rank(environment: Mapping[str, str]) -> str:
    """Return which rank this is, as its launcher says when it starts; Lightning says the local one only."""
    ranks = int(environment.get("WORLD_SIZE", "1"))
    rank = environment.get("RANK", environment.get("LOCAL_RANK", "0"))
    return f" [rank {rank} of {ranks}]" if ranks > 1 else ""


def _load_adapter(_accelerate: ModuleType) -> AbstractContextManager[object]:
    """Import our adapter, unless it is what imports Accelerate: it is installed once it has run."""
    importlib.import_module(_ADAPTER)
    return nullcontext()


def _loaded_names() -> set[str]:
    """Return the public names of this package that somebody has used: it loads each when first asked."""
    package = sys.modules["amp_plugin"]
    return vars(package).keys() & {*package.__all__}


def _counted(made: Mapping[str, int]) -> list[str]:
    return [f"{count} {name}" if count > 1 else name for name, count in made.items()]


@contextmanager
def _set(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
        self._names, self._act = set(names), act

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.discard(name)  # Python's own finders look now
        spec = importlib.util.find_spec(name)
        self._names.add(name)  # whoever looks may not import it
        if spec is None or spec.loader is None:
            return spec
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            self._names.discard(name)
            run(module)
            self._act(module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


# -- processes that a program starts --------------------------------------------------------------


def bind_environment() -> None:
    """Take over what ``AMP_PLUGIN_TAKEOVER`` says, for the whole process; ``import torch`` calls it."""
    given = os.environ.get(VARIABLE, "")
    if not given or is_launcher():
        return
    if given not in {_AS_WRITTEN, *_PRECISIONS}:
        allowed = ", ".join((*_PRECISIONS, _AS_WRITTEN))
        msg = f"{VARIABLE}={given} is unknown; allowed are {allowed}; amp-plugin run sets it, unset it"
        raise ValueError(msg)
    import atexit  # noqa: PLC0415 - most processes stop above

    precision: Any = given if given in _PRECISIONS else None
    takeover = Takeover(Path(sys.argv[0]).name or "this process", precision=precision)
    takeover.__enter__()
    atexit.register(takeover.__exit__, None, None, None)
