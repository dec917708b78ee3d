"""Frozen linear layers with weights in int8: a quarter of the memory of float32.

Each row of a weight matrix, which computes one output, has its own scale, so that its largest
weight is 127. Products are computed in the dtype of the input, with weights that are converted
back: this rounds the weights only, and takes longer than float32. Activations are not rounded.
The gradient passes through to the input, so prompts below the layer can be trained.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Int8Linear", "quantise_linear_layers", "is_quantised"]


class _Int8Product(torch.autograd.Function):
    """Product with a matrix in int8, which the backward pass converts again.

    Otherwise the converted matrices of all layers would be kept until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ (weight.to(gradient.dtype) * scale.to(gradient.dtype)), None, None


class Int8Linear(nn.Module):
    """Frozen linear layer whose weights are stored in int8, with a scale for each output."""

    def __init__(
        self,
        weight: Tensor,  # `[d_out,d_in]`
        bias: nn.Parameter | None,  # `[d_out]`, which keeps its dtype
    ) -> None:
        super().__init__()
        largest = weight.detach().abs().amax(1, keepdim=True).float()
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer in the dtype of `x`."""
        y = _Int8Product.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def quantise_linear_layers(
    module: nn.Module,  # such as the layers of a backbone; changed in place
) -> None:
    """Replace the linear layers of a module by layers with weights in int8."""
    for name, child in module.named_children():
        kind = type(child).__name__
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear(child.weight, child.bias))
        elif kind == "Conv1D":  # of GPT-2: a linear layer with a transposed matrix
            parameters = dict(child.named_parameters())
            weight = parameters["weight"].T.contiguous()
            setattr(module, name, Int8Linear(weight, parameters["bias"]))
        else:
            quantise_linear_layers(child)


def is_quantised(
    module: nn.Module,  # such as the layers of a backbone
) -> bool:
    """Return whether a module has linear layers in int8."""
    return any(isinstance(child, Int8Linear) for child in module.modules())
