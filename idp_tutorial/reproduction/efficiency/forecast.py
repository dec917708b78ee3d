"""Estimate time and memory of a training run from one forward pass and the cost model."""

from typing import Any

import torch

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.task import Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.reproduction.efficiency.cost_model import step_cost
from idp_tutorial.training.distributed import StepProfiler, create_accelerator
from idp_tutorial.training.evaluation import iterate_batches
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.checks import check_name

__all__ = ["estimate_training"]


def _time_forward_pass(model: PlannedModel, batch: dict, accelerator: Any) -> float:
    """Return the seconds of a forward pass of all layers: the best of three, after one warm-up."""
    profiler = StepProfiler(model, accelerator)
    for _ in range(4):
        profiler.start()
        with torch.no_grad():
            run_layers(model.backbone, batch)
        profiler.stop()
    return min(profiler.times_ms()[1:]) / 1000


def _typical_and_longest_batch(model: PlannedModel, task: Task, cfg: RunConfig) -> list[dict]:
    """Return a batch of examples of median length, and one of the longest examples."""
    examples = sorted(
        encode_for_model(model, task, cfg, task.splits["train"][:512]),
        key=lambda example: len(example["input_ids"]),
    )
    middle = max(0, (len(examples) - cfg.batch_size) // 2)
    selections = (examples[middle:], examples[-cfg.batch_size :])
    return [next(iterate_batches(model.backbone, part, cfg.batch_size)) for part in selections]


def _measure_training_memory(
    model: PlannedModel, task: Task, batch: dict, accelerator: Any
) -> float:
    """Return the memory of one training step in MB."""
    profiler = StepProfiler(model, accelerator)
    if task.is_regression:  # labels are scaled to 0 … 1 in training
        batch = {**batch, "label": torch.rand(len(batch["label"]), device=accelerator.device)}
    profiler.start()
    with accelerator.autocast(), profiler.track_activations(batch["input_ids"].numel()):
        model.train()(batch, return_loss=True)
    profiler.stop()
    return profiler.peak_memory_mb()


def estimate_training(
    cfg: RunConfig,  # of the run
    task: Task,  # with its splits
) -> dict:  # `params` by group, `memory_mb`, `ms_per_step`, `seconds` of the whole run
    """Estimate time and memory of a training run on this machine, without training."""
    check_name(cfg.method, METHODS, "method")
    accelerator = create_accelerator(cfg)
    model = build_model(cfg, load_config_backbone(cfg), task).to(accelerator.device)
    bb = model.backbone
    typical, longest = _typical_and_longest_batch(model, task, cfg)
    evaluation_pass = _time_forward_pass(model, typical, accelerator)  # without autocast
    training_pass = evaluation_pass
    if cfg.precision != "no":
        with accelerator.autocast():
            training_pass = _time_forward_pass(model, typical, accelerator)
    length = typical["input_ids"].shape[1]
    t = cfg.get("prompt_length", 0)
    cost = step_cost(cfg.method, bb.n_layers, cfg.get("layer"), prompt_length=t, T=length, d=bb.d)
    n_evaluations = -(-cfg.steps // cfg.eval_every)
    n_batches = len(task.splits["validation"]) * n_evaluations / len(typical["input_ids"])
    if METHODS[cfg.method].kind == "entailment":
        # a step scores the descriptions of two labels, an evaluation those of all labels
        n_batches *= len(task.labels) / 2
    step_seconds = training_pass * cost.total / bb.n_layers * cfg.accumulate
    evaluation_seconds = n_batches * evaluation_pass * cost.forward / bb.n_layers
    return dict(
        params=count_parameters(model),
        memory_mb=_measure_training_memory(model, task, longest, accelerator),
        ms_per_step=1000 * step_seconds,
        seconds=step_seconds * cfg.steps + evaluation_seconds,
    )
