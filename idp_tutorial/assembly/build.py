"""Build the model of a config: a frozen backbone, the plan of a method, and a head.

A model needs three things: a config, which names a method; a frozen backbone; and a task, which
defines the labels. `build_model` adds the method's plan and a head to the backbone. It seeds
all random number generators with the config's seed, so equal configs have equal initial
parameters.
"""

import torch

from idp_tutorial.assembly.class_weights import compute_class_weights
from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.assembly.controls import ControlConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.dtypes import DTYPES, is_quantised
from idp_tutorial.core.heads import ClassificationHead, GenerationHead, VerbalizerHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.random_numbers import exclusive_random_numbers, seed_random_numbers
from idp_tutorial.data.task import Task
from idp_tutorial.methods.backbone_edits import ensure_unmodified, revert_backbone
from idp_tutorial.methods.efl import EntailmentModel, describe_labels
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.utils.checks import UserError


def _count_outputs(task: Task) -> int:
    """Return the number of outputs of the head: 1 for a regression, else one for each label."""
    return 1 if task.is_regression else len(task.labels)


def _build_head(
    cfg: RunConfig, bb: Backbone, task: Task
) -> ClassificationHead | VerbalizerHead | GenerationHead:
    if task.is_generation:
        return GenerationHead(bb)
    if task.multi_label and cfg.head == "verbalizer":
        problem = "head='verbalizer' predicts one label word, and a row may have several labels"
        raise UserError(f"{problem}: use head='classification'.")
    if cfg.head == "verbalizer":
        return VerbalizerHead(bb, task.word_ids(bb.tokenizer), cfg.loss_vocab)
    return ClassificationHead(
        bb.d,
        _count_outputs(task),
        resolve_pooling(cfg, bb),
        cfg.two_layer_head,
    )


def resolve_pooling(
    cfg: RunConfig,  # its `pooling` is read
    bb: Backbone,  # the backbone
) -> str:
    """Return the pooling of a config; 'cls' is the last token for a decoder."""
    # the first token of a decoder has seen no other token
    return bb.default_pooling if cfg.pooling == "cls" else cfg.pooling


def weights_dtype(cfg: RunOptions) -> str:
    """Return the dtype for the backbone's weights, which is float32 if the method trains them."""
    is_trained = isinstance(cfg, RunConfig) and ALL_METHODS[cfg.method].trains_backbone
    return "float32" if is_trained else cfg.dtype


def load_config_backbone(cfg: RunOptions) -> Backbone:
    """Load the backbone of a config."""
    return load_backbone(cfg.backbone, dtype=weights_dtype(cfg))


def _require_float32_parameters(model: PlannedModel, cfg: RunConfig) -> None:
    # bfloat16 has three digits, so a small step is rounded away
    low_precision = [
        name
        for name, parameter in model.trained_parameters().items()
        if parameter.dtype != torch.float32
    ]
    if low_precision:
        raise UserError(
            f"{cfg.method!r} trains {low_precision[0]}, …, which are in bfloat16 and would round "
            "small updates away: load the backbone without dtype=."
        )


_MAX_PROMPT_LENGTH = 4096  # on a backbone with fewer positions


def _check_prompt_length(cfg: RunConfig, bb: Backbone) -> None:
    """Refuse a prompt that would fill the memory before its length is compared with a text's."""
    t = getattr(cfg.method_config, "prompt_length", 0)
    longest = max(_MAX_PROMPT_LENGTH, bb.max_tokens)
    if t > longest:
        raise UserError(
            f"prompt_length={t:,} is more than {longest:,} vectors, the most for backbone "
            f"{bb.name!r}: use a shorter prompt."
        )


def _assemble_model(cfg: RunConfig, bb: Backbone, task: Task) -> PlannedModel:
    _check_prompt_length(cfg, bb)
    plan = cfg.method_config.plan(bb, cfg)
    model: PlannedModel
    is_entailment = ALL_METHODS[cfg.method].kind == "entailment"
    if is_entailment and (task.multi_label or (cfg.class_weight and not task.pair)):
        raise UserError(
            f"method {cfg.method!r} scores pairs of a text and a label: leave class_weight out, or "
            "use another method for rows with several labels."
        )
    if is_entailment and not task.pair:  # a pair has premise and hypothesis already
        model = EntailmentModel(
            bb,
            describe_labels(task),
            dict(plan),
            resolve_pooling(cfg, bb),
            cfg.dropout_below_prompt,
            gradient_checkpointing=cfg.gradient_checkpointing,
        )
    else:
        model = PlannedModel(
            bb,
            _build_head(cfg, bb, task),
            plan,
            cfg.dropout_below_prompt,
            cfg.gradient_checkpointing,
        )
    _require_float32_parameters(model, cfg)
    if cfg.class_weight:
        model.head.class_weights = compute_class_weights(cfg.class_weight, task)
    return model


@exclusive_random_numbers()
def build_model(
    cfg: RunConfig,  # config of the run
    bb: Backbone,  # its backbone, without changes of an earlier method
    task: Task,  # its task; the training split is used for balanced class weights
) -> PlannedModel:  # in eval mode or training mode as the backbone
    """Build the model of a config, with parameters that are initialised under `cfg.seed`.

    Raises: `UserError` for a method, head, task and backbone that cannot be combined.
    """
    if bb.word_embeddings.weight.dtype not in DTYPES.values():
        dtype = bb.word_embeddings.weight.dtype
        raise UserError(f"backbone {bb.name!r} has weights in {dtype}: load it without dtype=.")
    if task.is_generation and ALL_METHODS[cfg.method].kind in ("entailment", "control"):
        problem = f"{cfg.method!r} predicts labels, and {task.name!r} is a generation task"
        raise UserError(f"{problem}: use another method.")
    changes_layers = ALL_METHODS[cfg.method].insertion_point in ("weights", "upper weights")
    if changes_layers and is_quantised(bb.layers):
        raise UserError(
            f"{cfg.method!r} changes the linear layers of the backbone, which int8 does not allow: "
            "use dtype='bfloat16' or 'float32'."
        )
    seed_random_numbers(cfg.seed)
    if isinstance(cfg.method_config, ControlConfig):
        head = cfg.method_config.build_head(bb, cfg, _count_outputs(task))
        return cfg.method_config.model_class(bb, head)
    ensure_unmodified(bb, cfg.method)
    try:
        return _assemble_model(cfg, bb, task)
    except BaseException:  # leave the caller's backbone as it was
        revert_backbone(bb)
        raise
