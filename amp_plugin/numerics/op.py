"""Watch the ops of a program with a dispatch mode, which passes each call to an op to observers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self

from amp_plugin.casting.installed_kernels import KERNELS
from amp_plugin.casting.op_names import full_name, written_arguments
from amp_plugin.numerics.modules import Tracker
from amp_plugin.numerics.places import ForwardSites, Site
from amp_plugin.numerics.simulated_ranks import is_local_tensor, local_tensors, of_rank, simulated_ranks
from amp_plugin.numerics.values import (
    Held,
    Storages,
    TensorSummary,
    is_low_precision,
    non_finite,
    real_values,
    summarise,
    unwatched,
)
from amp_plugin.quiet_hooks import register_quiet_hook

# The results of these ops share memory with an argument, although the schemas do not say so.
_VIEWS = frozenset({"_reshape_alias", "_unsafe_view", "alias", "detach", "set_"})

# The namespaces of collectives.
_OF_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})

# These ops return memory that has not been written yet.
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
     "_resize_output_", "resize_as_", "empty_quantized"}
)  # fmt: skip

# These ops copy elements and do not compute with them.
_MOVING = frozenset(
    {"_to_copy", "cat", "clone", "constant_pad_nd", "copy", "copy_", "diag_embed", "embedding", "flip",
     "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh", "lift_fresh_copy",
     "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "repeat",
     "roll", "scatter", "scatter_", "select_scatter", "slice_scatter", "sort", "stack", "take", "topk",
     "tril", "triu", "unfold_copy", "where"}
)  # fmt: skip

# These ops are pointwise, although torch does not tag them as pointwise.
_IN_PLACE_OF_EACH = frozenset({"_to_copy", "clone", "copy", "masked_fill", "where"})

# These ops do not read the tensor that they write to.
_OVERWRITING = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_",
     "random_", "uniform_", "zero_"}
)  # fmt: skip

# The kernels of these ops call other ops. Normally, autocast casts the inputs of these inner ops.
# While a dispatch mode is active, autocast does not see ops inside a kernel, unless `_in_block` is used.
_AUTOCAST_INSIDE = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")

_ASKED = "_callback_from_stance"  # torch calls this function when the program calls a compiled function

# These ops have an argument half_to_float, which must be False for inputs that are not fp16.
_HALF_TO_FLOAT = frozenset({"_softmax", "_log_softmax"})


# These ops use a workspace that the forward pass allocated for its own dtype.
# In a wider dtype, these ops would write beyond the end of this workspace.
_READ_A_WORKSPACE = frozenset({"_cudnn_rnn_backward", "miopen_rnn_backward", "mkldnn_rnn_layer_backward"})


class OpTraits:
    """Facts about an op that follow from its schema, its tags and the lists in this file."""

    def __init__(self, op: OpOverload) -> None:
        self._op = op

    @cached_property
    def name(self) -> str:
        """The full name of the op, such as ``"aten::exp.default"``."""
        return full_name(self._op._name)

    @cached_property
    def _packet(self) -> str:
        """The name of the op without namespace and overload, such as ``"exp_"``."""
        return self.name.split("::")[1].split(".")[0]

    @cached_property
    def base(self) -> str:
        """The name of the op without the marks of in-place and foreach variants, such as ``"exp"``."""
        return self._packet.removeprefix("_foreach_").removesuffix("_") or self._packet

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the op's arguments, in the order of the schema."""
        return tuple(argument.name for argument in self._op._schema.arguments)

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of the arguments that the op writes to."""
        return written_arguments(self.name)

    @cached_property
    def overwritten(self) -> frozenset[str]:
        """The names of the arguments that the op writes to without reading them."""
        out = {argument.name for argument in self._op._schema.arguments if argument.kwarg_only}
        return self.written if self._packet in _OVERWRITING else self.written & out

    @cached_property
    def is_view(self) -> bool:
        """Whether the op only returns a view of an argument."""
        return self._op.is_view or self._packet in _VIEWS

    @cached_property
    def is_unwritten(self) -> bool:
        """Whether the op returns memory that has not been written yet."""
        return self._packet in _UNWRITTEN

    @cached_property
    def partly_unwritten(self) -> tuple[int, ...]:
        """The indices of results in which the op leaves some elements unwritten.

        Only the backward pass uses these results.
        """
        return (1,) if self._packet == "_ctc_loss" else ()

    @cached_property
    def moves(self) -> bool:
        """Whether the op only copies elements and does not compute with them."""
        return self._packet in _MOVING

    @cached_property
    def calls_in_block(self) -> bool:
        """Whether the op's kernel calls other ops, and autocast casts the inputs of those ops."""
        return self._packet in _AUTOCAST_INSIDE

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether each element of a result depends only on the arguments' elements at the same position."""
        return torch.Tag.pointwise in self._op.tags or self.base in _IN_PLACE_OF_EACH

    @cached_property
    def is_listwise(self) -> bool:
        """Whether the op works on lists of tensors, entry by entry."""
        return self._packet.startswith(("_foreach_", "_fused_"))

    @cached_property
    def is_collective(self) -> bool:
        """Whether the op exchanges data with other ranks. The result may arrive after the op has returned."""
        return self._op.namespace in _OF_COLLECTIVES

    @cached_property
    def waits(self) -> bool:
        """Whether the op only waits for a collective to end."""
        return self.is_collective and self.base == "wait_tensor"

    @cached_property
    def may_draw(self) -> bool:
        """Whether the op may draw random numbers. Attention draws random numbers if its dropout is not 0."""
        return torch.Tag.nondeterministic_seeded in self._op.tags

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether the op always gives the same results for the same arguments."""
        reads_workspace = self._packet in _READ_A_WORKSPACE
        return not (self.may_draw or self.is_collective or self.is_unwritten or reads_workspace)


traits_of = cache(OpTraits)


@dataclass(eq=False)
class Argument:
    """A tensor among the arguments or results of an op."""

    name: str  # the name of the argument; empty for a result
    index: int | None  # the index of the tensor if the argument is a list of tensors; otherwise None
    tensor: Tensor

    @property
    def label(self) -> str:
        """The name of the argument, with the index of the tensor if the argument is a list of tensors."""
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    @property
    def is_discrete(self) -> bool:
        """Whether the tensor holds integers or booleans."""
        return not (self.tensor.is_floating_point() or self.tensor.is_complex())

    @cached_property
    def held(self) -> Held:
        """The non-finite values that are in the tensor when the op runs."""
        return non_finite(self.tensor)

    @cached_property
    def summary(self) -> TensorSummary:
        """A summary of the tensor as it is when the op runs."""
        return summarise(self.tensor)

    @cached_property
    def values(self) -> Tensor | None:
        """The tensor's values when the op runs, as real (not complex) numbers.

        None if the values cannot be read or were not copied.
        """
        return real_values(self.tensor)

    def keep(self, *, is_read: bool) -> None:
        """Summarise the tensor before the op writes to its memory.

        If ``is_read`` is True and an element is not finite, the values are copied.
        """
        self.summary = summarise(self.tensor)
        is_odd = is_read and bool(self.summary.nan or self.summary.inf)
        self.held = non_finite(self.tensor) if is_odd else ()
        values = real_values(self.tensor) if self.held else None
        self.values = None if values is None else values.clone()


def _tensors(name: str, value: Any) -> list[Argument]:
    if isinstance(value, (list, tuple)):
        return [Argument(name, index, leaf) for index, leaf in enumerate(value) if isinstance(leaf, Tensor)]
    return [Argument(name, None, value)] if isinstance(value, Tensor) else []


class Call:
    """One call to an op. Every observer receives this object.

    Attributes:
        rank: The rank that makes this call, if torch simulates several ranks in this process. Otherwise None.
    """

    def __init__(
        self,
        func: OpOverload,
        args: Any,
        kwargs: Mapping[str, Any],
        region: Region,
        rank: int | None = None,
    ) -> None:
        self._func, self._args, self._kwargs, self._region = func, args, kwargs, region
        self.rank = rank
        self.node = torch._C._current_autograd_node()  # the autograd node of a backward op; else None
        self.kept: Any = None  # data that an observer keeps until the op has run
        self.read: tuple[Any, ...] = ()  # the fingerprints of the inputs, if the run is recorded

    def keep(self, note: Any) -> None:
        """Attach an observer's data to this call. The observer can read the data after the op has run."""
        self.kept = note

    def keep_fingerprints(self, read: Iterator[Any]) -> None:
        """Keep the fingerprints of the inputs, because the op may overwrite the inputs."""
        self.read = tuple(read)

    @property
    def traits(self) -> OpTraits:
        """The facts about the op."""
        return traits_of(self._func)

    @cached_property
    def named(self) -> dict[str, Any]:
        """Maps the names of the arguments to their values."""
        return {**dict(zip(self.traits.arguments, self._args, strict=False)), **self._kwargs}

    @cached_property
    def given(self) -> list[Argument]:
        """The tensors among the arguments that the op reads or writes.

        addmm and similar ops do not read ``self`` if ``beta`` is 0.
        """
        unread = {"self"} if self._kwargs.get("beta") == 0 else ()
        read = [entry for entry in self.named.items() if entry[0] not in unread]
        return [argument for entry in read for argument in _tensors(*entry)]

    @cached_property
    def arguments(self) -> list[Argument]:
        """The floating-point and complex tensors among the arguments."""
        return [argument for argument in self.given if not argument.is_discrete]

    def made(self, output: Any) -> list[Argument]:
        """Return the arguments that the op has written to, and its results.

        Results that the op writes only in part are not returned.
        """
        written = [argument for argument in self.given if argument.name in self.traits.written]
        known = {id(argument.tensor) for argument in written}
        known |= {id(output[position]) for position in self.traits.partly_unwritten}
        values = output if isinstance(output, tuple) else (output,)
        results = [result for value in values for result in _tensors("", value)]
        return [*written, *(result for result in results if id(result.tensor) not in known)]

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks in the process group of a collective. Empty for other ops."""
        group, name = self.named.get("process_group"), self.named.get("group_name")
        if isinstance(name, str):
            group = vars(dist.distributed_c10d)["_resolve_process_group"](name)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        return () if group is None else tuple(dist.get_process_group_ranks(group))

    @property
    def draws(self) -> bool:
        """Whether the call draws random numbers."""
        may_drop = "dropout_p" in self.traits.arguments
        return self.traits.may_draw and not (may_drop and not self.named.get("dropout_p"))

    @property
    def is_backward(self) -> bool:
        """Whether the op runs in a backward pass."""
        return self.node is not None

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.is_backward else "forward"

    @property
    def leaf(self) -> Tensor | None:
        """The parameter whose gradient this autograd op accumulates. None for all other ops."""
        adds = self.is_backward and self.node.name().endswith("AccumulateGrad")
        return self.node.variable if adds else None  # type: ignore[attr-defined]

    @cached_property
    def forward_site(self) -> Site | None:
        """For a backward op, the place where its forward op was called; None if the place is not known."""
        return None if isinstance(self.node, BackwardCFunction) else self._region.sites.of(self.node)

    @cached_property
    def site(self) -> Site:
        """The place where the op was called or, for a backward op, the place of its forward op if known."""
        around = self._region.sites.of(self.node)
        module = self._region.tracker.current() or (around.module if around else "")
        return self.forward_site or Site.here(self.traits.name, module)

    @property
    def forward_op(self) -> str:
        """The name of the forward op. For a user's autograd function, the name of its autograd node."""
        return str(self.node.name()) if self.forward_site is None else self.forward_site.op

    def sites_before(self) -> Iterator[Site]:
        """Yield the call sites of the ops that computed this op's last tensor argument, latest op first.

        For a backward op, the search starts at the first argument of its forward op instead. The search
        follows the first input of each op back as far as autograd has recorded the graph.
        """
        node: Any = None if self.is_backward else self.arguments[-1].tensor.grad_fn
        if self.is_backward and self.node.next_functions:
            node = self.node.next_functions[0][0]
        while node is not None and (site := self._region.sites.of(node)) is not None:
            yield site
            node = node.next_functions[0][0] if node.next_functions else None

    def __str__(self) -> str:
        return f"{self.traits.name} at {self.site.place}" if self.site.place else self.traits.name

    @property
    def numbers(self) -> dict[str, float]:
        """Maps the name of each argument that is a Python number to its value. Floats in lists count, too."""
        found: dict[str, float] = {}
        for name, value in self.named.items():
            if isinstance(value, (list, tuple)):
                found |= {f"{name}[{i}]": entry for i, entry in enumerate(value) if isinstance(entry, float)}
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found[name] = float(value)
        return found

    @property
    def is_repeatable(self) -> bool:
        """Whether the op has tensor arguments, and would give the same results if it were called again."""
        return self.traits.is_repeatable and bool(self.given)

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Any, Any]:
        """Return a changed copy of the arguments, with which the op can run again.

        Args:
            change: A function that replaces each tensor. If the op writes to a tensor, ``change`` must return
                a copy of that tensor.
            dtype: The dtype that replaces 16-bit dtypes and float32 among the arguments.
        """
        tensors: dict[int, Tensor] = {}

        def leaf_of(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                if id(leaf) not in tensors:
                    tensors[id(leaf)] = change(leaf)
                return tensors[id(leaf)]
            is_narrow = isinstance(leaf, torch.dtype) and (is_low_precision(leaf) or leaf is torch.float32)
            return dtype if is_narrow else leaf

        args, kwargs = tree_map(leaf_of, (self._args, self._kwargs))
        return ((*args[:2], False) if self.traits.base in _HALF_TO_FLOAT else args), kwargs

    def again(self, given: tuple[Any, Any], results: Sequence[Tensor]) -> list[Tensor] | None:
        """Run the op on other arguments, and return its results if they have the shapes of ``results``.

        If the op fails or the shapes differ, count the op as not measured and return None.
        """
        args, kwargs = given
        try:
            output = self._func(*args, **kwargs)
        except Exception:  # noqa: BLE001 -- no kernel for the dtype, or a custom op that checks it
            made = []
        else:
            made = [m.tensor for m in Call(self._func, args, kwargs, self._region).made(output)]
        if [tensor.shape for tensor in made] == [result.shape for result in results]:
            return made
        self.count_unmeasured()
        return None

    def runs_in(self, dtype: torch.dtype) -> bool:
        """Return whether the op runs if its floating-point arguments are cast to ``dtype``."""

        def change(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

        args, kwargs = self.changed(change, dtype)
        try:
            self._func(*args, **kwargs)
        except Exception:  # noqa: BLE001 -- whatever the op raises, it does not run
            return False
        return True

    def count_unmeasured(self) -> None:
        """Record that the op cannot run again, so that its results are taken as exact."""
        self._region.unseen[self.traits.name] += 1


_EVENTS = ("open", "step_begins", "step_ended", "before", "after", "failed")
"""The events of a region. Each event is the name of a method that the region calls on its observers.

``open(stack)`` registers hooks, which the exit stack removes. ``step_begins(optimizer)`` and
``step_ended(optimizer)`` are called around an optimizer step. ``before(call)`` is called before an op runs.
``after(call, output)`` is called after an op has run, or ``failed(call, error)`` if it raised an error.
"""


class Region(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A region that calls its observers for each op that this thread runs, including backward ops.

    Compiled functions run eagerly in the region.
    """

    supports_higher_order_operators = True

    def __init__(self, tracker: Tracker, *observers: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker, told = tracker, (*observers, tracker)
        self._hooks = {
            event: [getattr(observer, event) for observer in told if hasattr(observer, event)]
            for event in _EVENTS
        }
        self._open = ExitStack()
        self.has_compiled = False  # whether a compiled function was called but ran eagerly
        self._block_of_kernel = ""  # the device type of the autocast block around the next fused kernel
        self.sites = ForwardSites()  # where the ops of the forward passes were called
        # Counts, for each op, the calls that could not be repeated or whose inner ops could not be watched.
        self.unseen: Counter[str] = Counter()
        self._simulated: tuple[int, ...] = ()  # the ranks that torch simulates in this process, if any
        self._owners: Storages[int] = Storages()  # maps a storage to the simulated rank that owns it

    def __enter__(self) -> Self:
        """Open the region."""
        from torch._dynamo import eval_frame  # noqa: PLC0415 - takes a second, and the stance loads it

        KERNELS.install()
        self._simulated = simulated_ranks()
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            ask = getattr(eval_frame, _ASKED, None)
            if ask is None:  # if torch lacks this function, calls to compiled functions cannot be detected
                self.has_compiled = True
            else:
                stack.enter_context(patch.object(eval_frame, _ASKED, self._notes_compiled(ask)))
            self.tell("open", stack)
            for name in _AUTOCAST_INSIDE:
                stack.enter_context(patch.object(torch, name, self._as_in_block(vars(torch)[name])))
            stack.callback(register_quiet_hook(None, partial(self._step, "step_begins")).remove)
            ended = register_optimizer_step_post_hook(partial(self._step, "step_ended"))
            stack.callback(ended.remove)
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.push(super().__exit__)
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the region."""
        self._open.close()
        self.ended(error)

    def _notes_compiled(self, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the torch function that runs whenever a compiled function is called, to detect these calls."""

        def choose_and_note(callback: Any) -> Any:
            self.has_compiled |= callback not in {None, False}
            return choose(callback)

        return choose_and_note

    def _as_in_block(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a fused op, so that autocast still casts the inputs of the op's inner ops in this region."""

        def run_in_block(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            device = first.device.type
            if torch.is_autocast_enabled(device):
                self._block_of_kernel = device
            try:
                return run(first, *args, **kwargs)
            finally:
                self._block_of_kernel = ""

        return run_in_block

    def _step(self, event: str, optimizer: Optimizer, *_: Any) -> None:
        self.tell(event, optimizer)

    def ended(self, error: BaseException | None) -> None:
        """Do the region's remaining work after its ``with`` block has ended.

        ``error`` is the error that ended the block, or None.
        """

    def tell(self, event: str, *what: Any) -> None:
        """Call the observers' methods for an event. Ops that the observers call are not watched."""
        with unwatched():
            for hook in self._hooks[event]:
                hook(*what)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op, and call the observers before and after it. Ops on fake tensors are not watched."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # ops inside a higher-order operator cannot be watched
            if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                self.unseen[str(func)] += 1
            return func(*args, **kwargs)
        if self._simulated and _is_fake_on_ranks((args, kwargs)):
            return func(*args, **kwargs)
        wrapping = [kind for kind in types if _dispatches(kind) and not self._has_ranks(kind)]
        if wrapping:
            if any(issubclass(kind, FakeTensor) for kind in wrapping):
                return func(*args, **kwargs)
            return NotImplemented  # the tensor subclass then calls ops on plain tensors, which are watched
        calls = self._calls(func, args, kwargs)
        self.sites.record(calls[0].traits.name, self.tracker.current())
        for call in calls:
            self.tell("before", call)
        try:
            device, self._block_of_kernel = self._block_of_kernel, ""
            with _in_block(device) if device else nullcontext():
                output = func(*args, **kwargs)
        except Exception as error:  # re-raised after the observers have been called
            self.tell("failed", calls[0], error)
            raise
        self._note_owners((args, kwargs), output, calls)
        for call in calls:
            self.tell("after", call, of_rank(output, call.rank))
        return output

    def _has_ranks(self, kind: type) -> bool:
        return bool(self._simulated) and is_local_tensor(kind)

    def _calls(self, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[Call]:
        """Return the call to an op, or one call for each rank if torch simulates several ranks."""
        if not self._simulated:
            return [Call(func, args, kwargs, self)]
        given, ranks = (args, kwargs), [*self._simulated]
        held = [*local_tensors(given)]
        if held:
            ranks = [rank for rank in ranks if all(rank in tensors for tensors in held)]
        else:  # torch runs some of its functions rank by rank, on plain tensors
            known = (self._owners.get(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            owners = {rank for rank in known if rank is not None}
            ranks = [*owners] if len(owners) == 1 else ranks
        calls = []
        for rank in ranks:
            own_args, own_kwargs = of_rank(given, rank)
            calls.append(Call(func, own_args, own_kwargs, self, rank))
        return calls

    def _note_owners(self, given: Any, output: Any, calls: Sequence[Call]) -> None:
        """Remember the simulated rank to which each tensor of an op belongs."""
        if not self._simulated:
            return
        for held in local_tensors((given, output)):
            for rank, tensor in held.items():
                self._owners.set(tensor, rank)
        if len(calls) == 1 and calls[0].rank is not None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor):
                    self._owners.set(leaf, calls[0].rank)


def _is_fake_on_ranks(values: Any) -> bool:
    """Return whether the tensors of simulated ranks are fake tensors, which only have shapes."""
    return any(isinstance(tensor, FakeTensor) for held in local_tensors(values) for tensor in held.values())


def is_watched() -> bool:
    """Return whether a region of this package watches the ops of this thread."""
    return any(isinstance(mode, Region) for mode in _get_current_dispatch_mode_stack())


def _in_block(device: str) -> AbstractContextManager[object]:
    """Let autocast cast the inputs of the ops inside a kernel.

    Without this context manager, an active dispatch mode hides these ops from autocast.
    """
    block = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(f"Autocast{device.upper()}"))
    excluded = torch._C._dispatch_tls_local_exclude_set() - block
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@cache
def _dispatches(kind: type) -> bool:
    """Return whether a tensor type overrides ``__torch_dispatch__``. Lazy parameters do not override it."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def listed(ops: Mapping[str, int]) -> str:
    """Return a string that lists the ops and how often each op was called."""
    return ", ".join(f"{name} ({count} {'call' if count == 1 else 'calls'})" for name, count in ops.items())
