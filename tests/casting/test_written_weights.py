"""Writes of a weight inside a region through an alias, by each kind of way: which are seen, and which not."""

from pathlib import Path

import pytest
import torch

import amp_plugin
from amp_plugin.casting.installed_kernels import UNWATCHED, UNWATCHED_OVERLOADS

pytestmark = pytest.mark.native
DOCUMENT = Path(amp_plugin.__file__).parents[1] / "docs" / "autocast.md"
X = torch.eye(3)
OTHER = torch.tensor([[0.5, -2.0, 1.0], [3.0, 0.25, -1.0], [2.0, 1.5, -0.5]])
INDEX = torch.tensor([2, 0])

# One of each kind; each writes a weight of 3 x 3 that holds no 0 and no 1.
SEEN = {
    "operator on data": lambda w: w.data.__imul__(2),
    "item of data": lambda w: w.data.__setitem__(0, 5.0),
    "row of data": lambda w: w.data[1].copy_(OTHER[0]),
    "negation": lambda w: w.data.neg_(),
    "product added": lambda w: w.data.addmm_(OTHER, OTHER),
    "indexed put": lambda w: w.data.index_put_((INDEX,), OTHER[:2]),
    "masked fill": lambda w: w.data.masked_fill_(OTHER > 0, 7.0),
    "normal": lambda w: w.data.normal_(),
    "list of tensors": lambda w: torch._foreach_neg_([w.data]),
    "out= of a product": lambda w: torch.mm(OTHER, OTHER, out=w.data),
    "out= of several": lambda w: torch.sort(OTHER, out=(w.data, torch.empty(3, 3, dtype=torch.long))),
    "swapped memory": lambda w: setattr(w, "data", OTHER.clone()),
    "no_grad": lambda w: torch.no_grad()(w.relu_)(),
    "detached, no op of the region": lambda w: w.detach().tanh_(),
    "set": lambda w: torch.no_grad()(w.set_)(OTHER.clone()),
    "view of other memory": lambda w: setattr(w, "data", torch.stack([OTHER, OTHER * 2])[1]),
    "transposed memory": lambda w: setattr(w, "data", w.data.t()),
    "fewer rows of the same memory": lambda w: setattr(w, "data", w.data[:2]),
    "loaded": lambda w: loaded(w, OTHER.clone()),
}


def loaded(weight, value):
    module = torch.nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": value})


def in_region_without_autocast(w):
    with amp_plugin.autocast("cpu", enabled=False):
        w.data.neg_()


UNSEEN = {
    "activation function": lambda w: w.data.tanh_(),
    "dropout's op": lambda w: w.data.bernoulli_(0.5),
    "exponential function": lambda w: w.data.exp_(),
    "scattered number": lambda w: w.data.scatter_(0, INDEX[None], 7.0),
    "out= of an absolute value": lambda w: torch.abs(OTHER, out=w.data),
    "numpy": lambda w: w.data.numpy().__imul__(2),
    "where autocast is off": in_region_without_autocast,
}


def uses_new_values(write) -> bool:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.linspace(-2.2, 2.9, 9).reshape(3, 3))
    with amp_plugin.autocast("cpu", dtype=torch.bfloat16):
        old = w @ X
        write(w)
        new = w @ X
    right = w.bfloat16() @ X.bfloat16()
    assert not torch.equal(old, right), "the write changes nothing"
    return torch.equal(new.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("name", [*SEEN, *UNSEEN])
def test_which_are_seen(name):
    assert uses_new_values((SEEN | UNSEEN)[name]) is (name in SEEN)


def test_every_op_that_writes_is_watched_or_named():
    """Ops of torch that write into a tensor: those not watched are few, and all of a kind."""
    with amp_plugin.autocast("cpu"):
        watched = set(torch.ops.amp_plugin._installed("cpu"))
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        base = packet.removeprefix("aten::")
        if not packet.startswith("aten::") or name in watched or not writes(packet, overload):
            continue
        tags = torch._C._get_operation_overload(packet, overload)[2]
        reshapes, only_in_torch_ops = torch.Tag.inplace_view in tags, torch.Tag.generated in tags
        named = base in UNWATCHED or f"{base}.{overload}".rstrip(".") in UNWATCHED_OVERLOADS
        assert named or reshapes or only_in_torch_ops or base.endswith("_backward"), name


def writes(packet, overload):
    """Say whether an op writes what it is given, in place or by ``out=``."""
    written = [
        a for a in torch._C._get_schema(packet, overload).arguments if a.alias_info and a.alias_info.is_write
    ]
    in_place = packet.endswith("_") and not packet.endswith("__")
    return bool(written) and (in_place or any(given.kwarg_only for given in written))


def test_the_documentation_names_what_is_not_watched():
    section = (
        DOCUMENT.read_text(encoding="utf-8").partition("### Writes inside a region")[2].partition("\n## ")[0]
    )
    for name in UNWATCHED_OVERLOADS:
        assert f"`{name.partition('.')[0]}`" in section, name
