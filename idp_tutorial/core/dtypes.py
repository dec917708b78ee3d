"""The dtype of frozen weights: bfloat16 where it is faster.

A frozen model is never updated, so its weights need fewer bits: no small update is ever added
to them. bfloat16 halves the memory, and newer processors and GPUs have instructions for
products in bfloat16. Others do not, and convert every number. Which kind this machine is, we
measure. Prompts, heads and losses are float32 in either case: the layer loop passes them
float32 states and converts their vectors to the dtype of the layers.

`RunConfig(dtype='auto')` uses the measurement. The default is `'float32'`, because with
`'auto'` equal configs would give different results on another machine. A record states the
dtype that was used as `weights_dtype`.
"""

import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.utils.checks import UserError, check_choice

__all__ = [
    "DTYPES",
    "MIN_SPEEDUP",
    "parse_dtype",
    "cast_weights",
    "measure_bfloat16_speedup",
    "choose_faster_dtype",
    "resolve_dtype",
]


# 4 bits need kernels that PyTorch lacks on a CPU; 8 bits need none
INT4_HINT = "weights in 4 bits are not supported; int8 is the smallest"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_dtype(
    dtype: str | torch.dtype,  # 'float32', 'bfloat16', 'int8', 'auto', or a torch dtype
) -> torch.dtype | str:  # a torch dtype, 'int8' or 'auto'
    """Return the torch dtype of a name; 'int8', 'auto' and torch dtypes are returned unchanged."""
    if isinstance(dtype, torch.dtype):
        return dtype
    check_choice(dtype, (*DTYPES, "int8", "auto"), "dtype", INT4_HINT)
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


def _time_product(x: Tensor, w: Tensor) -> float:
    """Return the seconds that one linear layer takes."""
    start = time.perf_counter()
    F.linear(x, w)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@cache
def measure_bfloat16_speedup(
    device: str,  # 'cpu' or 'cuda'
    n_in: int,  # columns of the matrix
    n_out: int,  # rows of the matrix
    rows: int = 512,  # batch size times sequence length
) -> float:
    """Return how many times faster a matrix product is in bfloat16 than in float32.

    The two are timed alternately, and the best of five repetitions counts. No random number is
    drawn, so a run that measures has the same random state as one that does not.
    """
    seconds: dict[torch.dtype, list[float]] = {dtype: [] for dtype in DTYPES.values()}
    for _ in range(6):  # the first repetition is a warm-up
        for dtype, times in seconds.items():
            x = torch.full((rows, n_in), 0.5, dtype=dtype, device=device)
            w = torch.full((n_out, n_in), 0.5, dtype=dtype, device=device)
            times.append(_time_product(x, w))
    return min(seconds[torch.float32][1:]) / min(seconds[torch.bfloat16][1:])


MIN_SPEEDUP = 1.2  # smallest speed-up for which bfloat16 is chosen


def choose_faster_dtype(
    model: Any,  # a Hugging Face model
    device: str | None = None,  # device of the run; None: a GPU if there is one
) -> torch.dtype:  # bfloat16 or float32
    """Return bfloat16 if a product with the model's largest matrix is clearly faster in it.

    The tables of word embeddings are not considered.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    vocab_size = model.get_input_embeddings().num_embeddings
    matrices = [p for p in model.parameters() if p.dim() == 2 and vocab_size not in p.shape]
    n_in, n_out = sorted(max(matrices, key=Tensor.numel).shape)
    if measure_bfloat16_speedup(device, n_in, n_out) >= MIN_SPEEDUP:
        return torch.bfloat16
    return torch.float32


def resolve_dtype(
    dtype: str | torch.dtype,  # 'float32', 'bfloat16', 'auto', or a torch dtype
    model: Any,  # a Hugging Face model, for 'auto'
) -> torch.dtype:
    """Return the torch dtype of a name; 'auto' is the faster one on this machine.

    Raises: `UserError` for 'int8', which is not one dtype of all weights.
    """
    parsed = parse_dtype(dtype)
    if parsed == "int8":
        raise UserError(
            "dtype='int8' is chosen when a backbone is loaded, such as in training: use 'float32', "
            "'bfloat16' or 'auto' for a trained model."
        )
    return parsed if isinstance(parsed, torch.dtype) else choose_faster_dtype(model)
