"""Recurrent weights: stored on the CPU, where autocast casts them; float32 where there is a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_plugin import autocast, store_weights
from tests.weights.twins import assert_same, away_from_ties

MAKES = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(6, 8, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(6, 8, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(6, 8, nonlinearity="relu", bias=False, batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(6, 8),
    "GRUCell": lambda: nn.GRUCell(6, 8),
    "RNNCell": lambda: nn.RNNCell(6, 8),
}


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        out = self.inner(x[:, 0] if isinstance(self.inner, nn.RNNCellBase) else x)
        while not isinstance(out, torch.Tensor):
            out = out[0]
        return out.float().square().mean()


def network(make, seed=0):
    torch.manual_seed(seed)
    model = Net(make)
    away_from_ties(model)
    return model


def train(model, optimizer, steps, region=autocast):
    losses = []
    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's LSTM in bfloat16 needs AVX512
        for step in steps:
            optimizer.zero_grad()
            x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(step))
            with region("cpu", dtype=torch.bfloat16):
                loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("name", MAKES)
def test_the_first_loss_is_autocasts_and_a_run_resumes(name):
    stock, model = network(MAKES[name]), network(MAKES[name])
    optimizer = adamw(model)
    assert len(store_weights(model, optimizer)) == len(list(model.parameters()))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    expected = train(stock, adamw(stock), range(3), torch.autocast)
    losses = train(model, optimizer, range(3))
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-3)
    resumed = network(MAKES[name], seed=1)
    restarted = adamw(resumed)
    store_weights(resumed, restarted)
    resumed.load_state_dict(model.state_dict())
    restarted.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, range(3, 6)) == train(resumed, restarted, range(3, 6))
    assert_same(model, resumed)


def test_they_stay_float32_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = nn.ModuleList([nn.LSTM(6, 8), nn.LSTMCell(6, 8)])
    assert len(store_weights(model)) == 4
    assert model[0].weight_hh_l0.dtype is torch.float32
    assert len(store_weights(model, weights="bf16-true")) == 8


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a build of torch for CUDA has that kernel")
def test_cudnns_kernel_takes_float16_in_a_region_of_bfloat16():
    """The reason: stored in bfloat16, weights would be rounded twice, and losses not be autocast's."""
    half, x = {"dtype": torch.float16, "device": "cuda"}, {"device": "cuda"}
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast does not without a GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            weights = [torch.empty(shape, **half) for shape in ((32, 6), (32, 8), (32,), (32,))]
            state = torch.empty(1, 3, 8, **x)
            out = torch._cudnn_rnn(
                torch.empty(5, 3, 6, **x), weights, 4, torch.empty(2000, **half), state, state,
                2, 8, 0, 1, False, 0.0, True, False, [], None,
            )  # fmt: skip
    finally:
        torch.set_autocast_enabled("cuda", was[0])
        torch.set_autocast_dtype("cuda", was[1])
    assert out[0].dtype is torch.float16
