"""A frozen backbone, an insertion plan and a head as one PyTorch module.

A comparison is fair if the methods differ in one respect. So every method uses the same heads,
and reports which parameters it trains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.plan_checks import check_plan
from idp_tutorial.core.single_position import run_for_position
from idp_tutorial.core.steps import Plan, PromptSource
from idp_tutorial.utils.batch import Batch
from idp_tutorial.utils.checks import UserError


class PlannedModel(nn.Module):
    """Frozen backbone with an insertion plan and a head."""

    # a model that does not read tokens of the backbone: rows → examples
    encode_texts: Callable[[Sequence[dict]], list[dict]] | None = None

    def __init__(
        self,
        backbone: Backbone,
        head: nn.Module,  # module context → output, with a `loss` method and `pooling`
        plan: Plan | None = None,  # layer → step; None: no prompt
        # keep dropout below the first prompt, as in the papers' code
        dropout_below_prompt: bool = False,
        # compute the layers again in the backward pass: less memory, more time
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.plan = plan or {}
        self.head: Any = head
        self.dropout_below_prompt = dropout_below_prompt
        self.gradient_checkpointing = gradient_checkpointing
        check_plan(self.plan, backbone)
        self.lm = backbone.model
        self.sources = nn.ModuleList(
            step.source for step in self.plan.values() if isinstance(step.source, nn.Module)
        )

    @property
    def first_trained_layer(self) -> int:
        """Lowest layer with a prompt or trainable parameters.

        It is `INPUT` for a prompt among the words or trained embeddings, and `n_layers` without
        either.
        """
        bb = self.backbone
        prompt_layers = list(self.plan)
        trained = {id(p) for p in self.lm.parameters() if p.requires_grad}
        if not trained:  # the usual case; this property is read in every step
            return min(prompt_layers, default=bb.n_layers)
        upper_modules = (*bb.layers, bb.norm)
        upper = {id(p) for module in upper_modules for p in module.parameters()}
        if any(id(p) in trained - upper for p in bb.base.parameters()):
            return INPUT  # the embeddings are trained
        trained_layers = [
            i
            for i, layer in enumerate(bb.layers)
            if any(id(p) in trained for p in layer.parameters())
        ]
        return min([*trained_layers, *prompt_layers], default=bb.n_layers)

    def prompt_sources(self) -> Iterator[PromptSource]:
        """Yield the prompt sources of the plan, and the parts of them that are sources too."""
        for module in self.sources.modules():
            if isinstance(module, PromptSource):
                yield module

    def train(self, mode: bool = True) -> "PlannedModel":
        """Set training mode, but keep the layers below the first prompt in eval mode."""
        super().train(mode)
        first = self.first_trained_layer
        if mode and not self.dropout_below_prompt and first >= 0:
            self.lm.eval()
            for layer in [*self.backbone.layers[first:], self.backbone.norm]:
                layer.train()
        return self

    @property
    def pooled_position(self) -> str | None:
        """Tracked position that the head reads; None if it reads several.

        The last layer need not compute other positions.
        """
        return None if self.head.pooling in ("mean", "answer", "all") else self.head.pooling

    def compute_context(
        self,
        batch: dict[str, Any],  # fields as for `Context.from_batch`
    ) -> Context:
        """Run the layers with the plan's prompts; resume from cached states if the batch has them.

        Raises: UserError if the model changes something below the cached states.
        """
        batch = Batch.from_tensors(batch)
        if batch.start_layer is not None:
            self._check_cached(batch.start_layer)
        return self._run(batch)

    def _run(self, batch: dict[str, Any]) -> Context:
        return run_for_position(
            self.backbone, batch, self.plan, self.pooled_position, self.gradient_checkpointing
        )

    def _check_cached(self, start_layer: int) -> None:
        if self.first_trained_layer < start_layer:
            reason = "the model trains or inserts something below that layer"
        elif self.training and self.dropout_below_prompt:
            reason = "dropout below that layer is on (dropout_below_prompt=True)"
        else:
            return
        raise UserError(
            f"the batch contains cached hidden states after {start_layer} layers, but {reason}. "
            "Encode the examples again without a cache."
        )

    def forward(
        self,
        batch: dict[str, Any],  # fields as for `Context.from_batch`
        return_loss: bool = False,  # return the loss, which needs 'label' in the batch
    ) -> Tensor:
        """Return the head's output `[B,C]`, or its loss.

        The loss is computed here because wrappers for distributed training hook into `forward`.
        """
        ctx = self.compute_context(batch)
        return self.head.loss(ctx, batch.get("label")) if return_loss else self.head(ctx)

    def loss(
        self,
        batch: dict[str, Any],  # fields as for `Context.from_batch`, and 'label'
    ) -> Tensor:
        """Return the head's loss on a batch."""
        return self(batch, return_loss=True)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name; the others are frozen."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def parameter_groups(
        self,
        lr: float,
        head_lr: float | None = None,  # learning rate of the head; None: `lr`
    ) -> list[dict[str, Any]]:
        """Return the trainable parameters as groups for a torch optimizer, one per learning rate.

        A prompt source can scale `lr` for some of its parameters (`PromptSource.lr_scale`).
        """
        scales: dict[nn.Parameter, float] = {}
        for source in self.prompt_sources():
            for name, scale in source.lr_scale.items():
                scales[source.get_parameter(name)] = scale
        if head_lr:
            scales |= {p: head_lr / lr for p in self.head.parameters()}
        groups: dict[float, list[nn.Parameter]] = {}
        for p in self.trained_parameters().values():
            groups.setdefault(scales.get(p, 1.0), []).append(p)
        return [dict(params=params, lr=lr * scale) for scale, params in groups.items()]


def _count_trainable(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def count_parameters(model: PlannedModel) -> dict[str, int]:
    """Return the number of trainable parameters of prompt, head and backbone.

    They are never summed: a head can have more parameters than the prompt.
    """
    return dict(
        prompt=_count_trainable(model.sources),
        head=_count_trainable(model.head),
        backbone=_count_trainable(model.lm),
    )


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and saved buffers of a module by name, each once."""
    saved_names = module.state_dict().keys()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved_names}


def trained_state(model: PlannedModel) -> dict[str, Tensor]:
    """Return all tensors that training changes, by name.

    These are the trainable parameters and the running statistics of sources.
    """
    # trainable parameters, and buffers outside of the language model
    return {
        name: tensor
        for name, tensor in persistent_tensors(model).items()
        if tensor.requires_grad or not (isinstance(tensor, nn.Parameter) or name.startswith("lm."))
    }


def copy_state(
    state: Mapping[str, Tensor],  # tensors by name, from `trained_state`
) -> dict[str, Tensor]:
    """Return copies of the tensors of a model."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def restore_state(
    state: Mapping[str, Tensor],  # tensors of the model by name, which are changed in place
    saved: Mapping[str, Tensor],  # their values; a tensor without a value is left unchanged
) -> None:
    """Copy saved values into the tensors of a model.

    Raises: `KeyError` for a value whose tensor the model does not have.
    """
    for name, value in saved.items():
        state[name].copy_(value)
