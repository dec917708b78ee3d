"""The first stage of IDPG's supplementary training."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers.utils import logging as hf_logging

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone, backbone_id
from idp_tutorial.core.planned_model import PlannedModel, trained_state
from idp_tutorial.data.task import Task
from idp_tutorial.runs.record import checkpoint_folder, remove_checkpoints
from idp_tutorial.saving.descriptions import read_prompts
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.digests import write_manifest
from idp_tutorial.utils.durable_files import file_lock, move_into_place
from idp_tutorial.utils.records import config_fingerprint, describe_differences
from idp_tutorial.utils.schemas import Count, Finite, check_schema
from idp_tutorial.utils.tensor_files import save_tensors


def append_swapped_pairs(
    rows: list[dict],  # rows with `sentence1` and `sentence2`
) -> list[dict]:  # twice as many rows
    """Return all pairs followed by the same pairs with swapped sentences (IDPG §A.4).

    Raises: `UserError` if the rows are not pairs.
    """
    if not rows or "sentence2" not in rows[0]:
        raise UserError(
            "the rows have no second sentence to swap: give a task of sentence pairs, or set "
            "with_swapped_pairs=False."
        )
    swapped = [
        {**row, "sentence1": row["sentence2"], "sentence2": row["sentence1"]} for row in rows
    ]
    return [*rows, *swapped]


def _train_all_weights(
    cfg: RunConfig,
    build_model: Callable,
    task: Task,
    rows: list[dict],
    checkpoint_dir: Path | None,
) -> tuple[PlannedModel, TrainLog]:
    """Train backbone, prompts and head on the rows of the intermediate task."""
    bb = load_backbone(cfg.backbone)
    model = build_model(cfg, bb, task)
    if bb.active_edit is not None:
        raise UserError(
            f"{cfg.method!r} adds weights inside the backbone, and the saved backbone would not "
            "have them: use a prompt method or fine-tuning."
        )
    bb.base.requires_grad_(True)
    pooler = getattr(bb.base, "pooler", None)
    if pooler is not None:  # its output is not used, so it has no gradient
        pooler.requires_grad_(False)
    task = replace(task, splits={**task.splits, "train": rows})
    return model, fit(model, task, cfg, checkpoint_dir=checkpoint_dir)


def run_supplementary_training(
    # of stage 1: backbone, method, lr, epochs …; `task` is replaced (IDPG, Table 4: lr=1e-5,
    # epochs=10, batch_size=32, weight_decay=0.1, warmup=0.0)
    cfg: RunConfig,
    # function (cfg, backbone, task) -> `PlannedModel`, such as `assembly.build.build_model`
    build_model: Callable[[RunConfig, Backbone, Task], PlannedModel],
    task: Task,  # the intermediate task with its splits; the paper's is MNLI
    folder: Path | str,  # folder for the trained backbone and prompts
    with_swapped_pairs: bool = True,  # double the training data by swapping the sentences
) -> dict:  # `folder`, `steps`, `validation` (score on the intermediate task), `config` and others
    """Train backbone and prompts on an intermediate task and save both (IDPG §A.4).

    A folder that was made with the same settings and data is reused, and a run that was killed
    continues from its last checkpoint.
    Raises: `UserError` for a folder that was made otherwise, a method that adds weights inside
    the backbone, or a task without pairs.
    """
    folder = Path(folder)
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a link that leads to no folder: give the folder itself.")
    rows = task.splits["train"]
    if with_swapped_pairs:
        rows = append_swapped_pairs(rows)
    cfg = replace(cfg, task=task.name, cache="none", init_from=None, accumulate=1)
    cfg = cfg.resolve_epochs(len(rows))
    description = dict(
        config=cfg.to_dict(),
        rows=[len(split) for split in task.splits.values()],
        fingerprint=dict(
            **config_fingerprint(cfg),
            with_swapped_pairs=with_swapped_pairs,
            weights=backbone_id(load_backbone(cfg.backbone)),
            data=task.digest(),
        ),
    )
    description = json.loads(json.dumps(description))  # as it will be read from the file
    with file_lock(folder):
        if folder.exists():
            return _load_matching_run(folder, description)
        checkpoints = checkpoint_folder(folder, description["fingerprint"])
        model, training_log = _train_all_weights(cfg, build_model, task, rows, checkpoints)
        description |= dict(steps=training_log.steps, validation=training_log.validation)
        _save_tuned_backbone(model, folder, description)
        remove_checkpoints(checkpoints)
    return {**description, "folder": str(folder)}


@dataclass
class _SavedStage:
    """Schema of the description of stage 1."""

    config: dict[str, Any]
    rows: list[Count]
    fingerprint: dict[str, Any]
    steps: Count
    validation: Finite


def _load_matching_run(folder: Path, description: dict) -> dict:
    """Return the saved description of an earlier stage 1 if it had the same settings and data."""
    file = folder / "supplementary.json"
    if not file.is_file():
        raise UserError(
            f"{folder} exists and was not written by run_supplementary_training: use another "
            f"folder."
        )
    saved, _ = read_prompts(folder)  # its digest is checked; the file is a copy for people
    check_schema(_SavedStage, saved, folder, "delete it to train it again")
    differences = describe_differences(saved["fingerprint"], description["fingerprint"])
    if differences:
        raise UserError(
            f"{folder} holds another run ({differences}): give another folder, or delete this one."
        )
    return {**saved, **description, "folder": str(folder)}  # equal up to paths and the device


def _save_tuned_backbone(model: PlannedModel, folder: Path, description: dict) -> None:
    """Save backbone, prompts, head and description; the folder appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    has_progress_bar = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model.lm.save_pretrained(temporary)
        model.backbone.tokenizer.save_pretrained(temporary)
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in trained_state(model).items()
            if not name.startswith("lm.")
        }
        save_tensors(temporary / "prompts.safetensors", tensors, description)
        (temporary / "supplementary.json").write_text(json.dumps(description))
        write_manifest(temporary)
        move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if has_progress_bar:
            hf_logging.enable_progress_bar()
