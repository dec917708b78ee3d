"""Files of a `PromptModel`: write a prompt with its head, and read it for a model.

A prompt belongs to the weights of its model, which are compared by their digests. A classifier on a
model that `load_backbone` finds by its name is written as `idp train` writes one, so that
`idp predict` reads it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.dtypes import DTYPES
from idp_tutorial.core.prompted_model import PromptedModel, persistent_tensors, restore_state
from idp_tutorial.huggingface.settings import (
    HEADS,
    TASK_TYPES,
    PromptSettings,
    find_label_token_ids,
)
from idp_tutorial.saving.descriptions import (
    PROMPT_MODEL_FORMAT,
    SAVE_FORMAT,
    describe_backbone,
    describe_run,
    have_same_shapes,
    load_saved_backbone,
    parse_saved_run,
    remember_local_backbone,
    write_prompts,
)
from idp_tutorial.saving.hub import SavedPrompts
from idp_tutorial.utils.checks import UserError, check_choice
from idp_tutorial.utils.records import collect_versions

__all__ = ["prompt_tensors", "read_prompt_settings", "save_prompt", "restore_prompt"]


def _base_digests(bb: Backbone) -> dict[str, str]:
    """Return the SHA-256 digests of the weights that the layers use, by dtype.

    They are the same for every class of a model: heads and poolers are left out. A head that uses
    the pooler has a copy.
    """
    hashes = {name: hashlib.sha256() for name in DTYPES}
    for name, tensor in sorted(bb.base.state_dict().items()):
        if "pooler." in name or name.startswith("decoder."):
            continue
        for dtype, digest in hashes.items():
            value = tensor.detach().cpu().to(DTYPES[dtype]).contiguous()
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return {dtype: digest.hexdigest() for dtype, digest in hashes.items()}


def _check_same_base(saved: Mapping[str, Any], bb: Backbone, folder: Path | str) -> None:
    """Raise `UserError` unless prompts were trained on the weights of this model."""
    digests = _base_digests(bb)
    for dtype in (bb.dtype_name, saved["dtype"]):
        if dtype in digests and saved["digests"].get(dtype) == digests[dtype]:
            return
    raise UserError(
        f"the prompts of {folder} belong to another model: the weights of {bb.name!r} differ. Load "
        "the model they were trained on."
    )


def _describe_named_backbone(bb: Backbone, digests: dict[str, str]) -> dict[str, Any] | None:
    """Describe the model as `idp predict` loads it by name; None if it cannot."""
    if bb.tokenizer is None or bb.causal:  # a decoder's texts are encoded in another way
        return None
    try:
        named = load_backbone(bb.name, dtype=bb.dtype_name)
    except UserError:
        return None
    return describe_backbone(named, bb.name) if _base_digests(named) == digests else None


def prompt_tensors(
    prompted: PromptedModel,  # the prompt and its head, on their model
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
    saved = description.get("prompt_model")
    if saved is None:
        named = load_saved_backbone(
            description["backbone"], cfg.backbone, None, f"the prompts of {folder}"
        )
        _check_same_base(dict(digests=_base_digests(named), dtype=named.dtype_name), bb, folder)
        if task.is_generation:
            return PromptSettings(cfg, "CAUSAL_LM", "keep")
        token_ids = find_label_token_ids(task, bb) if cfg.head == "verbalizer" else ()
        return PromptSettings(cfg, "SEQ_CLS", cfg.head, task.labels, token_ids)
    _check_same_base(saved["base"], bb, folder)
    task_type = check_choice(saved["task_type"], TASK_TYPES, "task_type")
    head = check_choice(saved["head"], HEADS, "head")
    token_ids = tuple(saved["label_token_ids"])
    n_tokens = bb.word_embeddings.weight.shape[0]
    n_expected = len(task.labels) if head == "verbalizer" else 0
    is_decoder = task_type == "CAUSAL_LM"
    fits = len(token_ids) == n_expected and all(i < n_tokens for i in token_ids)
    if not fits or is_decoder != task.is_generation or (is_decoder and head != "keep"):
        raise UserError(
            f"{folder} has task_type={task_type!r}, head={head!r} and {len(token_ids)} "
            "label_token_ids, which do not belong to its task or this model: save it again."
        )
    return PromptSettings(cfg, task_type, head, task.labels, token_ids)


def save_prompt(
    prompted: PromptedModel,  # the prompt and its head, on their model
    settings: PromptSettings,  # those of the prompt
    folder: Path,  # created if missing
) -> None:
    """Save a prompt and its head, with a description from which they can be built again."""
    bb = prompted.backbone
    digests = _base_digests(bb)
    named = _describe_named_backbone(bb, digests) if settings.head == "classification" else None
    description = dict(
        format=SAVE_FORMAT if named else PROMPT_MODEL_FORMAT,
        version=collect_versions()["idp_tutorial"],
        **describe_run(settings.task, settings.cfg),
        backbone=named or dict(name=bb.config.model_type, local=False),
        glove=None,
        digests=None,
        formula=[],
        prompt_model=dict(
            task_type=settings.task_type,
            head=settings.head,
            label_token_ids=settings.label_token_ids,
            base=dict(dtype=bb.dtype_name, digests=digests),
        ),
    )
    write_prompts(folder, prompt_tensors(prompted), description)
    if named:
        remember_local_backbone(named, bb.name)


def restore_prompt(
    prompted: PromptedModel,  # built from the settings; its tensors are replaced
    settings: PromptSettings,  # from `read_prompt_settings`
    saved: SavedPrompts,  # from `read_saved_prompts`
) -> None:
    """Copy the saved tensors of a prompt and its head.

    Raises: `UserError` if their shapes differ.
    """
    tensors = prompt_tensors(prompted)
    if not have_same_shapes(tensors, saved.tensors):
        if settings.head == "keep":
            raise UserError(
                f"{saved.source} has a trained copy of a classifier for "
                f"num_labels={settings.num_labels}, which does not fit this model: "
                "load the model with this number, by AutoModelForSequenceClassification."
            )
        raise UserError(
            f"the tensors of {saved.source} do not fit the model that its config describes: save "
            "it again with this version."
        )
    restore_state(tensors, saved.tensors)
