"""Recurrent weights are stored in 16 bits on the CPU, where autocast casts them.

With a GPU they stay float32.
"""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from amp_plugin import autocast, restore_weights, store_weights
from tests.weights.twins import assert_same, away_from_ties, exact

MAKES = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(6, 8, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(6, 8, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(6, 8, nonlinearity="relu", bias=False, batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(6, 8),
    "GRUCell": lambda: nn.GRUCell(6, 8),
    "RNNCell": lambda: nn.RNNCell(6, 8),
}


def trained(make, region, *, stored):
    """Take three steps. Return their losses and the model."""
    torch.manual_seed(0)
    model = make()
    away_from_ties(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stored:
        assert len(store_weights(model, optimizer)) == len(list(model.parameters()))
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    x, losses = torch.randn(3, 5, 6), []
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's LSTM in bfloat16 needs AVX512
        for _ in range(3):
            optimizer.zero_grad()
            with region("cpu", dtype=torch.bfloat16):
                out = model(x[:, 0] if isinstance(model, nn.RNNCellBase) else x)
            loss = tree_leaves(out)[0].float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("name", MAKES)
def test_the_first_loss_is_autocasts_and_the_model_is_restored(name):
    expected, _ = trained(MAKES[name], torch.autocast, stored=False)
    losses, model = trained(MAKES[name], autocast, stored=True)
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-3)
    state = exact(model)
    loaded = MAKES[name]()
    store_weights(loaded)
    loaded.load_state_dict(state)
    restore_weights(model)
    assert_same(loaded, model)


def test_they_stay_float32_where_there_is_a_gpu(monkeypatch):
    """On a GPU, cuDNN uses float16 even in a bfloat16 region, so the weights would be rounded twice."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = nn.ModuleList([nn.LSTM(6, 8), nn.LSTMCell(6, 8)])
    assert len(store_weights(model)) == 4
    assert model[0].weight_hh_l0.dtype is torch.float32
    assert len(store_weights(model, weights="bf16-true")) == 8
