"""Optimizers of other libraries, where they are installed."""

import pytest
import torch

from tests.weights.twins import assert_same, assert_steps_and_resumes, step, twins


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW32bit", "AdamW8bit", "Lion32bit"])
def test_bitsandbytes_steps_and_resumes_bit_for_bit(name):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert_steps_and_resumes(getattr(bitsandbytes.optim, name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Lion", "Lamb", "Adan", "ScheduleFreeAdamW", "Shampoo", "RAdam", "Prodigy"])
def test_pytorch_optimizer_steps_bit_for_bit(name):
    make = getattr(pytest.importorskip("pytorch_optimizer"), name)
    reference, stored, store = twins()
    optimizers = [make(model.parameters()) for model in (reference, stored)]
    store.add(optimizers[1])
    for number in range(20):
        step(number, (reference, stored), optimizers)
    assert_same(reference, stored)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_exact_is_refused():
    library = pytest.importorskip("pytorch_optimizer")
    _, stored, store = twins()
    with pytest.raises(TypeError, match="Lookahead was made without Optimizer.__init__"):
        store.add(library.Lookahead(torch.optim.SGD(stored.parameters(), lr=1e-3), k=3))
    with pytest.raises(TypeError, match=r"LOMO steps in backward.*weights='fp32'"):
        store.add(library.LOMO(stored, lr=1e-3))
    _, stored, store = twins()
    optimizer = library.AdaHessian(stored.parameters())
    store.add(optimizer)
    stored(torch.ones(2, 7, dtype=torch.bfloat16)).float().square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"AdaHessian .*create_graph=True.*weights='fp32'"):
        optimizer.step()
    for param in stored.parameters():
        param.grad = None
