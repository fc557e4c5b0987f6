import pytest
import torch
from torch import nn

from atom_core.models.cpu_linear import PreparedLinear, prepare_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (1, 7), (1, 64), (33,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_equal_those_in_float64(dtype, rows, bias):
    torch.manual_seed(sum(rows))
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    states = torch.randn(*rows, 48).to(dtype)
    expected = states.double() @ linear.weight.detach().double().t()
    if bias:
        expected += linear.bias.detach().double()
    with torch.inference_mode():
        found = PreparedLinear(linear)(states)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert torch.allclose(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_can_be_read(dtype, bias):
    """Some routers multiply by a linear layer's weight themselves, or ask for its dtype."""
    linear = nn.Linear(37, 130, bias=bias).to(dtype)
    prepared = PreparedLinear(linear)
    assert prepared.weight.dtype is dtype
    assert torch.equal(prepared.weight, linear.weight)
    assert torch.equal(prepared.bias, linear.bias) if bias else prepared.bias is None


def make_model():
    return nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "own": nn.Sequential(nn.Linear(8, 8))})


def test_modules_that_read_their_weights_keep_them():
    model = make_model()
    assert prepare_linears(model, frozenset({"own"}), budget_bytes=10**6) == 4 * 64
    assert isinstance(model["mlp"][0], PreparedLinear)
    assert type(model["own"][0]) is nn.Linear


def test_without_memory_everything_stays():
    model = make_model()
    assert prepare_linears(model, frozenset(), budget_bytes=4 * 128 - 1) == 0
    assert type(model["mlp"][0]) is nn.Linear


def test_tied_weights_stay_whole():
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    prepare_linears(model, frozenset(), budget_bytes=10**6)
    states = torch.randn(3, 8)
    with torch.inference_mode():
        assert torch.allclose(model["head"](states), states @ embedding.weight.t(), atol=1e-5)
        assert torch.equal(model["embedding"](torch.tensor([5]))[0], embedding.weight[5])
