"""An AdamW optimizer with float32 master weights for a model that computes in half precision.

Half precision doubles the speed of a CPU with bfloat16 instructions, and more on a GPU. But a
weight stored in bfloat16 cannot take a small step. The optimizer therefore keeps *master
weights* in float32, and the model computes with their rounded copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MasterWeightOptimizer"]


class MasterWeightOptimizer:
    """AdamW on float32 master weights, with linear warm-up, a plateau and linear decay to 0.

    Biases and norms (parameters with one dimension) have no weight decay.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],  # modules to train; they are converted to `cfg.dtype`
        cfg: Any,  # `lr`, `warmup`, `steps`, `decay_fraction` and `dtype`, as in `PretrainConfig`
    ) -> None:
        self.model_parameters = [p for module in modules for p in module.parameters()]
        self.master_parameters = [
            p.detach().clone().requires_grad_() for p in self.model_parameters
        ]
        for module in modules:
            module.to(getattr(torch, cfg.dtype))
        matrices = [p for p in self.master_parameters if p.dim() > 1]
        vectors = [p for p in self.master_parameters if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                dict(params=matrices, weight_decay=0.01),
                dict(params=vectors, weight_decay=0.0),
            ],
            lr=cfg.lr,
            betas=(0.9, 0.98),
            eps=1e-6,
            fused=True,
        )

        def learning_rate_factor(step: int) -> float:
            """Return the factor on the learning rate at a step."""
            warmup = (step + 1) / cfg.warmup
            decay = (cfg.steps - step) / max(1, cfg.decay_fraction * cfg.steps)
            return min(warmup, 1.0, decay)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor)

    def step(self) -> None:
        """Clip the gradients, update the master weights, and copy them to the model."""
        for parameter, master in zip(self.model_parameters, self.master_parameters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.master_parameters, 1.0)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.copy_to_model()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the master weights to the model, rounded to its dtype."""
        for parameter, master in zip(self.model_parameters, self.master_parameters):
            parameter.copy_(master)

    @torch.no_grad()
    def copy_from(self, weights: Sequence[Tensor]) -> None:
        """Replace the master weights, and copy them to the model."""
        for master, weight in zip(self.master_parameters, weights, strict=True):
            master.copy_(weight)
        self.copy_to_model()

    def state_dict(self) -> dict:
        """Return the master weights and the states of optimizer and schedule."""
        return dict(
            master_parameters=[master.detach() for master in self.master_parameters],
            optimizer=self.optimizer.state_dict(),
            lr_scheduler=self.lr_scheduler.state_dict(),
        )

    def load_state_dict(self, state: dict) -> None:
        """Restore the state that `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.copy_from(state["master_parameters"])
