"""Give an example the prompt that was generated for another one, and compare the predictions."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.context import Context
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task, require_classes
from idp_tutorial.training.evaluation import iterate_batches
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.utils.checks import UserError


def _predict_with_sources(
    model: PlannedModel,
    sources: dict[int, Callable[[Context], Tensor]],
    examples: Sequence[dict],
    batch_size: int,
) -> Tensor:
    """Return the logits `[N,C]` of a model whose plan has other prompt sources."""
    plan = {layer: replace(step, source=sources[layer]) for layer, step in model.plan.items()}
    other = PlannedModel(model.backbone, model.head, plan).eval()
    batches = iterate_batches(model.backbone, examples, batch_size)
    return torch.cat([other(batch).float().cpu() for batch in batches])


def _recording_source(
    source: Callable[[Context], Tensor], record: list[Tensor]
) -> Callable[[Context], Tensor]:
    """Wrap a prompt source so that its prompts are appended to a list."""

    def generate(ctx: Context) -> Tensor:
        """Return the prompt of the wrapped source."""
        prompt = source(ctx)
        record.append(prompt)
        return prompt

    return generate


def _replaying_source(prompts: Tensor, batch_size: int) -> Callable[[Context], Tensor]:
    """Return a prompt source that gives each batch its part of stored prompts."""
    batches = iter(prompts.split(batch_size))
    return lambda ctx: next(batches)


@torch.no_grad()
def collect_prompts(
    model: PlannedModel,  # trained
    examples: Sequence[dict],  # from `encode_for_evaluation`
    batch_size: int = 128,  # examples in a batch
) -> tuple[dict, Tensor]:  # layer of the plan → prompts `[N,t,d]`; logits of the model `[N,C]`
    """Return the prompts that a model generates for each example, and its logits."""
    records: dict[int, list[Tensor]] = {layer: [] for layer in model.plan}
    sources = {
        layer: _recording_source(step.source, records[layer]) for layer, step in model.plan.items()
    }
    logits = _predict_with_sources(model.eval(), sources, examples, batch_size)
    return {layer: torch.cat(prompts) for layer, prompts in records.items()}, logits


@torch.no_grad()
def predict_with_prompts(
    model: PlannedModel,
    prompts: dict,  # from `collect_prompts`, in any order of examples `[N,t,d]`
    examples: Sequence[dict],  # from `encode_for_evaluation`
    batch_size: int = 128,  # examples in a batch
) -> Tensor:  # `[N,C]`
    """Return the logits of a model that is given `prompts[layer][i]` for example i."""
    sources = {layer: _replaying_source(p, batch_size) for layer, p in prompts.items()}
    return _predict_with_sources(model.eval(), sources, examples, batch_size)


def _sample_donors(
    labels: Tensor,  # `[N]`
    same_label: bool,  # whether donor and example have the same label
    rng: torch.Generator,
) -> Tensor:  # indices `[N]`
    """Sample for each example another one whose prompt it receives."""
    allowed = (labels[:, None] == labels) == same_label
    allowed.fill_diagonal_(False)
    if not bool(allowed.any(1).all()):
        raise UserError(
            "prompts can be swapped only if there are two labels with at least two examples each: "
            "use a split with more examples."
        )
    return torch.multinomial(allowed.float(), 1, generator=rng)[:, 0]


def evaluate_prompt_swaps(
    model: PlannedModel,  # trained, with a generator: a static prompt is the same for all examples
    task: Task,  # classification, with its splits
    cfg: RunConfig,  # of the run that trained the model
) -> tuple[dict, dict]:  # scores; logits `[N,C]` by kind of prompt, `same_donor` and `other_donor`
    """Score the test examples with their own, mean, same-label and other-label prompts.

    Raises: `UserError` for a task without classes, and for a split with too few examples.
    """
    require_classes(task, "swapping prompts")
    batch_size = 4 * cfg.batch_size
    examples = encode_for_evaluation(model, task, cfg, task.splits["test"])
    labels = torch.tensor([e["label"] for e in examples])
    rng = torch.Generator().manual_seed(0)
    prompts, own_logits = collect_prompts(model, examples, batch_size)
    mean_prompts = {layer: p.mean(0, keepdim=True).expand_as(p) for layer, p in prompts.items()}
    logits = {
        "own": own_logits,
        "mean": predict_with_prompts(model, mean_prompts, examples, batch_size),
    }
    donors = {}
    for kind in ("same", "other"):
        donors[kind] = indices = _sample_donors(labels, kind == "same", rng)
        swapped = {layer: p[indices.to(p.device)] for layer, p in prompts.items()}
        logits[kind] = predict_with_prompts(model, swapped, examples, batch_size)
    scores = {
        kind: task.score_outputs(outputs, examples)[0][task.metric]
        for kind, outputs in logits.items()
    }
    is_donor_label = logits["other"].argmax(-1) == labels[donors["other"]]
    scores["follows"] = 100 * is_donor_label.double().mean().item()
    return scores, {**logits, **{f"{kind}_donor": indices for kind, indices in donors.items()}}
