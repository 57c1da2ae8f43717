"""Autograd functions whose backward autograd cannot differentiate again."""

from __future__ import annotations

import torch


def refuse_second_derivative(what: str) -> None:
    """For the first line of a backward that computes `what`'s gradients out of autograd's sight.

    torch's `once_differentiable` is silent where the incoming gradient is a constant, as a loss's own is: a penalty on
    the gradients then counts in the loss and not in what is learnt from it.

    Raises ValueError where backward runs under create_graph.
    """
    if torch.is_grad_enabled():
        raise ValueError(f"create_graph is set and {what} has no second derivative; take gradients without it")
