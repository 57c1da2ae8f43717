"""Copies of parameters in the dtype of the computation: made when they have to be, and gradients in the parameter's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.lora import Lora
from engine.models.matrices import Linear
from engine.ops.copies import Copies, computed, copy_of, joined
from engine.ops.products import linear


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Rows of 128 elements, so that copies follow one another without a gap."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(rows, 128, dtype=dtype)) for rows in (6, 4, 2)]


def test_a_copy_is_made_again_only_of_a_parameter_that_was_written() -> None:
    parameters = matrices()
    copies = Copies(parameters, torch.bfloat16)
    copies.refresh()
    for parameter in parameters:
        assert torch.equal(copy_of(parameter), parameter.detach().bfloat16())
    copy_of(parameters[0]).zero_()  # shows whether it is written again
    with torch.no_grad():
        parameters[1].mul_(3)
    copies.refresh()
    assert not copy_of(parameters[0]).any()
    assert torch.equal(copy_of(parameters[1]), parameters[1].detach().bfloat16())


def test_copies_that_follow_one_another_are_one_matrix_without_a_copy() -> None:
    parameters = matrices()
    Copies(parameters, torch.bfloat16).refresh()
    copies = [copy_of(parameter) for parameter in parameters]
    whole = joined(copies)
    assert whole.data_ptr() == copies[0].data_ptr()
    assert torch.equal(whole, torch.cat(copies))
    for others in (copies[::-1], [copies[0], copies[2]], [each.clone() for each in copies]):
        whole = joined(others)
        assert torch.equal(whole, torch.cat(others))
        assert whole.data_ptr() not in [each.data_ptr() for each in others]


def gradients(x: Tensor, parameters: list[nn.Parameter], dout: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(linear(leaf, parameters), [leaf, *parameters], dout))


@pytest.mark.parametrize("count", [1, 3])
def test_gradients_have_the_parameters_dtype_and_one_rounding_less(count: int) -> None:
    parameters = matrices()[:count]
    x, dout = torch.randn(2, 5, 128), torch.randn(2, 5, sum(each.shape[0] for each in parameters))
    x, dout = x.bfloat16(), dout.bfloat16()
    rounded = [nn.Parameter(each.detach().bfloat16()) for each in parameters]
    truth = gradients(x.double(), [nn.Parameter(each.detach().double()) for each in rounded], dout.double())
    plain = gradients(x, rounded, dout)
    Copies(parameters, torch.bfloat16).refresh()
    found = gradients(x, parameters, dout)
    assert [each.dtype for each in found] == [torch.bfloat16] + [torch.float32] * count
    for own, other, exact in zip(found, plain, truth, strict=True):
        assert (own.double() - exact).norm() <= 1.01 * (other.double() - exact).norm()
        torch.testing.assert_close(own.double(), exact, rtol=2e-2, atol=2e-2)


def test_a_copy_in_the_graph_gives_its_gradient_to_the_parameter() -> None:
    parameter = matrices()[0]
    Copies([parameter], torch.bfloat16).refresh()
    (2 * computed(parameter)).sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2))


def test_a_second_derivative_through_copies_is_refused() -> None:
    parameters = matrices()
    Copies(parameters, torch.bfloat16).refresh()
    x = torch.randn(3, 128).bfloat16().requires_grad_()
    with pytest.raises(ValueError, match="product with copies of parameters has no second derivative"):
        torch.autograd.grad(linear(x, parameters).sum(), x, create_graph=True)


@pytest.mark.parametrize("added", ["adapters", "bias"])
def test_backward_copies_no_gradient_of_what_is_added_in_place(added: str) -> None:
    layer = Linear(128, 6, bias=added == "bias")
    if added == "adapters":
        layer.weight.requires_grad_(False)
        layer.weight.data = layer.weight.bfloat16()
        layer.adapt(Lora(rank=2, alpha=4.0, targets=("q",)), torch.float32)
    Copies([each for each in layer.parameters() if each.requires_grad], torch.bfloat16).refresh()
    node = layer(torch.randn(2, 5, 128).bfloat16()).grad_fn
    names = []
    while node is not None:  # the way back through what is added to
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert "_LinearBackward" in names
    assert not [name for name in names if "CopySlices" in name or "AsStrided" in name]
