"""Which writes to a weight inside a region are noticed?

The version counter, the memory and optimizer steps tell.
"""

import pytest
import torch

import amp_plugin

pytestmark = pytest.mark.native
X = torch.eye(3)
OTHER = torch.tensor([[0.5, -2.0, 1.0], [3.0, 0.25, -1.0], [2.0, 1.5, -0.5]])


def loaded(weight, value):
    module = torch.nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": value})


# Each function writes a 3 x 3 weight that contains no 0 and no 1.
SEEN = {
    "no_grad": lambda w: torch.no_grad()(w.relu_)(),
    "list of tensors under no_grad": lambda w: torch.no_grad()(torch._foreach_neg_)([w]),
    "detached": lambda w: w.detach().tanh_(),
    "out= of a product": lambda w: torch.no_grad()(torch.mm)(OTHER, OTHER, out=w.detach()),
    "set": lambda w: torch.no_grad()(w.set_)(OTHER.clone()),
    "loaded": lambda w: loaded(w, OTHER.clone()),
    "swapped memory": lambda w: setattr(w, "data", OTHER.clone()),
    "view of other memory": lambda w: setattr(w, "data", torch.stack([OTHER, OTHER * 2])[1]),
    "transposed memory": lambda w: setattr(w, "data", w.data.t()),
    "fewer rows of the same memory": lambda w: setattr(w, "data", w.data[:2]),
}

# As in torch.autocast, these are not noticed: the weight's version counter does not change.
UNSEEN = {
    "operator on data": lambda w: w.data.__imul__(2),
    "row of data": lambda w: w.data[1].copy_(OTHER[0]),
    "list of data": lambda w: torch._foreach_neg_([w.data]),
    "out= into data": lambda w: torch.mm(OTHER, OTHER, out=w.data),
    "numpy": lambda w: w.data.numpy().__imul__(2),
}


def uses_new_values(write, autocast=amp_plugin.autocast, after=lambda: None) -> bool:
    w = torch.nn.Parameter(torch.linspace(-2.2, 2.9, 9).reshape(3, 3))
    with autocast("cpu", dtype=torch.bfloat16):
        old = w @ X
        write(w)
        after()
        new = w @ X
    right = w.bfloat16() @ X.bfloat16()
    assert not torch.equal(old, right), "the write changes nothing"
    return torch.equal(new, right)


@pytest.mark.parametrize("name", SEEN)
def test_a_write_that_moves_the_version_or_the_memory_is_seen(name):
    assert uses_new_values(SEEN[name])


@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_through_an_alias_follows_torchs_rule(name):
    """Neither torch's blocks nor our regions notice it until the cache is cleared."""
    for autocast in (torch.autocast, amp_plugin.autocast):
        assert not uses_new_values(UNSEEN[name], autocast)
        assert uses_new_values(UNSEEN[name], autocast, after=torch.clear_autocast_cache)
