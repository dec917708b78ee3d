"""The dtype of frozen weights: float32, bfloat16, or int8 in linear layers.

A frozen model is never updated, so its weights need fewer bits: no small update is ever added
to them. bfloat16 halves the memory, and newer processors and GPUs have instructions for
products in bfloat16. Prompts, heads and losses are float32 in either case: the layer loop passes
them float32 states and converts their vectors to the dtype of the layers. A record states the
dtype that was used as `weights_dtype`.

Frozen linear layers with weights in int8 need a quarter of the memory of float32. Each row of a
weight matrix, which computes one output, has its own scale, so that its largest weight is 127.
Products are computed in the dtype of the input, with weights that are converted back: this rounds
the weights only, and takes longer than float32. Activations are not rounded. The gradient passes
through to the input, so prompts below the layer can be trained.
"""

from typing import Any

import torch
from torch import Tensor, nn

from idp_tutorial.utils.checks import check_choice

# 4 bits need kernels that PyTorch lacks on a CPU; 8 bits need none
INT4_HINT = "weights in 4 bits are not supported; int8 is the smallest"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_dtype(
    dtype: str | torch.dtype,  # 'float32', 'bfloat16', 'int8', or a torch dtype
) -> torch.dtype | str:  # a torch dtype, or 'int8'
    """Return the torch dtype of a name; 'int8' and torch dtypes are returned unchanged."""
    if isinstance(dtype, torch.dtype):
        return dtype
    check_choice(dtype, (*DTYPES, "int8"), "dtype", INT4_HINT)
    return DTYPES.get(dtype, dtype)


def cast_weights(
    model: nn.Module,
    dtype: torch.dtype,
) -> nn.Module:  # the same model
    """Convert the parameters of a model in place.

    Buffers are not converted: in bfloat16, the rotary frequencies would give wrong angles.
    """
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


class _Int8Product(torch.autograd.Function):
    """Product with a matrix in int8, which the backward pass converts again.

    Otherwise the converted matrices of all layers would be kept until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the product with the converted matrix."""
        ctx.save_for_backward(weight, scale)
        return x @ (weight.to(x.dtype) * scale.to(x.dtype)).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `x`; the matrix is frozen."""
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
