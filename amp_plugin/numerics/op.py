"""One op while it runs, and the recorder: the only dispatch mode, which hands each op to an observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from amp_plugin.casting.dispatcher import KERNELS
from amp_plugin.casting.op_names import full_name, written_arguments
from amp_plugin.numerics.modules import Modules
from amp_plugin.numerics.places import ForwardSites, Site, called_from, in_autocast_block, runs_backward
from amp_plugin.numerics.values import unwatched

# They share memory with an argument, though their schemas do not say so.
_VIEWS = frozenset({"_reshape_alias", "_unsafe_view", "alias", "detach", "set_"})

# Results of these are memory that nobody has written yet.
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
     "_resize_output_", "resize_as_", "empty_quantized"}
)  # fmt: skip

# These results are room for the backward pass, of which only the parts that it reads are written.
_ROOM = {"_ctc_loss": frozenset({1})}

# These move elements and compute none.
_MOVING = frozenset(
    {"_to_copy", "cat", "clone", "constant_pad_nd", "copy", "copy_", "diag_embed", "embedding", "flip",
     "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh", "lift_fresh_copy",
     "masked_fill", "masked_fill_", "masked_scatter", "masked_scatter_", "masked_select", "repeat",
     "roll", "scatter", "scatter_", "select_scatter", "slice_scatter", "sort", "stack", "take", "topk",
     "tril", "triu", "unfold_copy", "where"}
)  # fmt: skip

# Each element of a result comes from that place in the arguments, though torch does not tag them so.
_IN_PLACE_OF_EACH = frozenset({"_to_copy", "clone", "copy", "masked_fill", "where"})

# What they write into is not read.
_OVERWRITING = frozenset(
    {"bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_",
     "random_", "uniform_", "zero_"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTraits:
    """What is known of an op before it runs.

    Attributes:
        name: full name, ``"aten::exp.default"``.
        base: the name alone, in-place forms and lists as the plain op: ``"exp"``.
        arguments: names of its arguments, in order.
        written: names of the arguments it writes into.
        overwritten: those of them that it does not read.
        is_view: it computes nothing, its results share memory with an argument.
        is_unwritten: its results are memory with whatever was there.
        partly_unwritten: positions of results of which that is true in parts.
        moves: it moves elements and computes none.
        is_pointwise: each element of a result depends on the elements in that place.
        is_listwise: it treats the elements of its lists one by one.
        is_collective: it takes part in communication, perhaps still under way when it returns.
        is_random: it draws numbers.
    """

    name: str
    base: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    overwritten: frozenset[str]
    is_view: bool
    is_unwritten: bool
    partly_unwritten: frozenset[int]
    moves: bool
    is_pointwise: bool
    is_listwise: bool
    is_collective: bool
    is_random: bool


@cache
def traits_of(op: OpOverload) -> OpTraits:
    """Return what is known of an op, from its schema, its tags and a few lists of names."""
    name = full_name(op._name)
    packet = name.split("::")[1].split(".")[0]
    base = packet.removeprefix("_foreach_").removesuffix("_") or packet
    written = written_arguments(name)
    out = frozenset(argument.name for argument in op._schema.arguments if argument.kwarg_only)
    return OpTraits(
        name=name,
        base=base,
        arguments=tuple(argument.name for argument in op._schema.arguments),
        written=written,
        overwritten=written if packet in _OVERWRITING else written & out,
        is_view=op.is_view or packet in _VIEWS,
        is_unwritten=packet in _UNWRITTEN,
        partly_unwritten=_ROOM.get(packet, frozenset()),
        moves=packet in _MOVING,
        is_pointwise=torch.Tag.pointwise in op.tags or base in _IN_PLACE_OF_EACH,
        is_listwise=packet.startswith(("_foreach_", "_fused_")),
        is_collective=op.namespace in {"c10d", "_c10d_functional", "_c10d_functional_autograd"},
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """A tensor that an op was given, or one it returned.

    Attributes:
        name: of the argument; empty for a result.
        index: its place in a list of tensors; None outside lists.
        tensor: the tensor.
    """

    name: str
    index: int | None
    tensor: Tensor

    @property
    def label(self) -> str:
        """The name, with the place in the list."""
        return self.name if self.index is None else f"{self.name}[{self.index}]"


def arguments_of(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    """Return the floating-point and complex tensors among an op's arguments, in order."""
    named = [*zip(traits.arguments, args, strict=False), *kwargs.items()]
    if kwargs.get("beta") == 0:  # what addmm and its kin add is not read then
        named = [(name, value) for name, value in named if name != "self"]
    return [argument for name, value in named for argument in _tensors(name, value)]


def results_of(output: Any) -> list[Argument]:
    """Return the floating-point and complex tensors among an op's results."""
    values = output if isinstance(output, tuple) else (output,)
    return [result for value in values for result in _tensors("", value)]


def made_by(traits: OpTraits, arguments: Sequence[Argument], output: Any) -> list[Argument]:
    """Return the arguments an op has written and its other results, but for those written in parts only."""
    written = [argument for argument in arguments if argument.name in traits.written]
    known = {id(argument.tensor) for argument in written} | {id(output[i]) for i in traits.partly_unwritten}
    return [*written, *(result for result in results_of(output) if id(result.tensor) not in known)]


def scalars_of(traits: OpTraits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Return the Python numbers among an op's arguments by their names, those in lists too."""
    found: dict[str, float] = {}
    for name, value in [*zip(traits.arguments, args, strict=False), *kwargs.items()]:
        if isinstance(value, (list, tuple)):
            numbers = [entry for entry in value if isinstance(entry, float)]
            found |= {f"{name}[{index}]": number for index, number in enumerate(numbers)}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def _tensors(name: str, value: Any) -> Iterator[Argument]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield Argument(name=name, index=None, tensor=value)
    elif isinstance(value, (list, tuple)):
        for index, tensor in enumerate(value):
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                yield Argument(name=name, index=index, tensor=tensor)


class Call:
    """One call of an op: the record that every observer reads.

    Args:
        func: the op.
        args, kwargs: what it was given.
        modules: knows which module runs.
        sites: know the forward ops of a backward pass.

    Attributes:
        arguments: the floating-point and complex tensors among the arguments.
        node: the autograd node that runs it; None in a forward pass.
        kept: what an observer notes before the op runs, for afterwards.
    """

    def __init__(
        self, func: OpOverload, args: Any, kwargs: Mapping[str, Any], modules: Modules, sites: ForwardSites
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.traits = traits_of(func)
        self.arguments = arguments_of(self.traits, args, kwargs)
        self.node = torch._C._current_autograd_node()
        self.kept: Any = None
        self._modules, self._sites = modules, sites

    @property
    def is_backward(self) -> bool:
        """Whether a backward pass runs the op."""
        return runs_backward(self.node)

    @property
    def direction(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return "backward" if self.is_backward else "forward"

    @property
    def accumulates(self) -> bool:
        """Whether autograd adds a gradient to that of a leaf."""
        return self.is_backward and self.node.name().endswith("AccumulateGrad")

    @property
    def leaf(self) -> Tensor:
        """The leaf to whose gradient autograd adds."""
        leaf: Tensor = self.node.variable  # type: ignore[attr-defined]
        return leaf

    @property
    def scalars(self) -> dict[str, float]:
        """The Python numbers among the arguments, by name."""
        return scalars_of(self.traits, self.args, self.kwargs)

    @cached_property
    def forward_site(self) -> Site | None:
        """Where the forward op of a backward op ran; None in a forward pass and where that is not known."""
        return self._sites.of(self.node)

    @cached_property
    def site(self) -> Site:
        """Where the op was called; in a backward pass, where its forward op was."""
        return self.forward_site or Site(
            self.traits.name, self._modules.current(), called_from(), in_autocast_block()
        )

    @property
    def recorded_site(self) -> Site | None:
        """The site under which autograd's node of this op is found again in the backward pass."""
        return self._sites.latest(self.site)

    @property
    def forward_op(self) -> str:
        """The forward op's name; of a function of the user's, that of its node."""
        if isinstance(self.node, torch.autograd.function.BackwardCFunction) or self.forward_site is None:
            return str(self.node.name())
        return self.forward_site.op

    @property
    def is_transposed(self) -> bool:
        """Whether this is a transposed convolution, or its backward pass."""
        given = {**dict(zip(self.traits.arguments, self.args, strict=False)), **self.kwargs}
        return given.get("transposed") is True

    def here(self) -> str:
        """Return where the op was called, in one line."""
        return " at ".join(filter(None, (self.traits.name, str(self.site.where.place or ""))))


class Observer(Protocol):
    """What looks at each op."""

    def before(self, call: Call) -> None:
        """Look at an op's arguments before it runs."""

    def after(self, call: Call, output: Any) -> None:
        """Look at what an op has returned and written."""

    def failed(self, call: Call) -> None:
        """Look at the arguments of an op that raised an error."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hand each op of this thread, and of the backward passes it starts, to an observer.

    Attributes:
        sites: where the ops of the forward passes ran.
        unseen: names of ops whose inner ops could not be watched -> how often they ran.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Modules, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = ForwardSites()
        self.unseen: Counter[str] = Counter()
        self._modules, self._observer = modules, observer

    def __enter__(self) -> Self:
        self.sites.open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op between the observer's two looks; fake tensors have no numbers to look at."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_whole(func, args, kwargs)
        if any(_dispatches(kind) for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)
            return NotImplemented  # the subclass's own ops come here one by one
        call = Call(func, args, kwargs, self._modules, self.sites)
        self.sites.record(call.traits.name, self._modules.current())
        with unwatched():
            self._observer.before(call)
        try:
            output = func(*args, **kwargs)
        except Exception:  # it is raised again; what led to it is reported before
            with unwatched():
                self._observer.failed(call)
            raise
        with unwatched():
            self._observer.after(call, output)
        return output

    def _run_whole(self, func: HigherOrderOperator, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an op that is given functions, and count it: what happens in them is not seen."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            self.unseen[str(func)] += 1
        return func(*args, **kwargs)


@cache
def _dispatches(kind: type) -> bool:
    """Return whether a type of tensors has ops of its own; lazy parameters have not."""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


class Follower(Protocol):
    """What follows a program by hooks of its own, between open and close."""

    def open(self) -> None:
        """Place the hooks."""

    def close(self) -> None:
        """Remove them."""


class Region:
    """A region of a program whose ops a recorder sees; compiled functions run eagerly in it.

    Args:
        modules: follows the modules.
        observer: looks at each op.
        *followers: opened before the recorder, closed after it.

    Attributes:
        recorder: the dispatch mode.
    """

    def __init__(self, modules: Modules, observer: Observer, *followers: Follower) -> None:
        self.recorder = Recorder(modules, observer)
        self._followers = (*followers, modules)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Open the region."""
        KERNELS.install()
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for follower in self._followers:
                follower.open()
                stack.callback(follower.close)
            stack.enter_context(self.recorder)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the region."""
        self._open.close()
