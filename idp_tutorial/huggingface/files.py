"""Files of a `PromptModel`: write a prompt with its head, and read it for a model.

A prompt belongs to the weights of its model, which `backbone_id` identifies. A classifier on a
model that `load_backbone` finds by its name is written as `idp train` writes one, so that
`idp predict` reads it.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone, backbone_id
from idp_tutorial.core.planned_model import PlannedModel, persistent_tensors, restore_state
from idp_tutorial.huggingface.prompts import PromptSettings, find_label_token_ids
from idp_tutorial.saving.descriptions import (
    PROMPT_MODEL_FORMAT,
    SAVE_FORMAT,
    check_backbone_matches,
    describe_backbone,
    describe_run,
    describe_weights,
    load_saved_backbone,
    parse_saved_run,
    remember_local_backbone,
    tensor_shapes,
    write_prompts,
)
from idp_tutorial.saving.hub import SavedPrompts
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import collect_versions


def _describe_named_backbone(bb: Backbone) -> dict[str, Any] | None:
    """Describe the model as `idp predict` loads it by name; None if it cannot."""
    if bb.tokenizer is None or bb.causal:  # a decoder's texts are encoded in another way
        return None
    try:
        named = load_backbone(bb.name, dtype=bb.dtype_name)
    except UserError:
        return None
    is_same = backbone_id(named, weights_only=True) == backbone_id(bb, weights_only=True)
    return describe_backbone(named, bb.name) if is_same else None


def prompt_tensors(
    prompted: PlannedModel,  # the prompt and its head, on their model
) -> dict[str, Tensor]:  # by name
    """Return the tensors of a prompt and its head, each once, whether they are trained or not."""
    return {n: x for n, x in persistent_tensors(prompted).items() if not n.startswith("lm.")}


def read_prompt_settings(
    saved_prompts: SavedPrompts,  # of a `PromptModel` or of `idp train`
    bb: Backbone,  # the model that gets the prompt
) -> PromptSettings:
    """Return the settings of a saved prompt.

    Raises: `UserError` if it is damaged, or was trained on another model.
    """
    folder, _, description, tensors = saved_prompts
    task, cfg = parse_saved_run(description, folder, description["version"], tensors)
    dependent = f"the prompts of {folder}"
    saved = description.get("prompt_model")
    if saved is None:
        named = load_saved_backbone(description["backbone"], cfg.backbone, None, dependent)
        base = describe_weights(named, weights_only=True)
        check_backbone_matches(base, bb, dependent, named.name, weights_only=True)
        if task.is_generation:
            return PromptSettings(cfg, "CAUSAL_LM", "keep")
        token_ids = find_label_token_ids(task, bb) if cfg.head == "verbalizer" else ()
        return PromptSettings(cfg, "SEQ_CLS", cfg.head, task.labels, token_ids)
    check_backbone_matches(saved["base"], bb, dependent, cfg.backbone, weights_only=True)
    task_type = saved["task_type"]
    head = saved["head"]
    token_ids = tuple(saved["label_token_ids"])
    n_tokens = bb.word_embeddings.weight.shape[0]
    n_expected = len(task.labels) if head == "verbalizer" else 0
    is_decoder = task_type == "CAUSAL_LM"
    fits = len(token_ids) == n_expected and max(token_ids, default=0) < n_tokens
    if not fits or is_decoder != task.is_generation or (is_decoder and head != "keep"):
        raise UserError(
            f"{folder} has task_type={task_type!r}, head={head!r} and {len(token_ids)} "
            "label_token_ids, which do not belong to its task or this model: save it again."
        )
    return PromptSettings(cfg, task_type, head, task.labels, token_ids)


def save_prompt(
    prompted: PlannedModel,  # the prompt and its head, on their model
    settings: PromptSettings,  # those of the prompt
    folder: Path,  # created if missing
) -> None:
    """Save a prompt and its head, with a description from which they can be built again."""
    bb = prompted.backbone
    base = describe_weights(bb, weights_only=True)
    named = _describe_named_backbone(bb) if settings.head == "classification" else None
    run = describe_run(settings.task, settings.cfg)
    description = dict(
        format=SAVE_FORMAT if named else PROMPT_MODEL_FORMAT,
        version=collect_versions()["idp_tutorial"],
        **run,
        backbone=named or dict(base, name=run["cfg"]["backbone"], local=False),
        glove=None,
        digests=None,
        formula=[],
        prompt_model=dict(
            task_type=settings.task_type,
            head=settings.head,
            label_token_ids=settings.label_token_ids,
            base=base,
        ),
    )
    write_prompts(folder, prompt_tensors(prompted), description)
    if named:
        remember_local_backbone(named, bb.name)


def restore_prompt(
    prompted: PlannedModel,  # built from the settings; its tensors are replaced
    settings: PromptSettings,  # from `read_prompt_settings`
    saved: SavedPrompts,  # from `read_saved_prompts`
) -> None:
    """Copy the saved tensors of a prompt and its head.

    Raises: `UserError` if their shapes differ.
    """
    tensors = prompt_tensors(prompted)
    if tensor_shapes(tensors) != tensor_shapes(saved.tensors):
        raise UserError(
            f"the tensors of {saved.source} do not fit this model: load it with the class of "
            f"training and num_labels={settings.num_labels}, or save the prompt again."
        )
    restore_state(tensors, saved.tensors)
