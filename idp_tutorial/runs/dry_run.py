"""Checks that find what would stop a comparison before anything is trained or written.

A comparison may run for a night. Its methods, head and output folder are checked first, and
whether the longest example fits: every method is built once and processes the longest example
of the task.
"""

from dataclasses import replace
from pathlib import Path

import torch

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.controls import ALL_METHODS
from idp_tutorial.assembly.options import refuse_unread_options
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.saving.first_stage import load_first_stage
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.utils.checks import UserError, check_between, check_name, check_writable_folder
from idp_tutorial.utils.config import RunConfig

__all__ = ["validate_comparison", "dry_run_comparison"]


def validate_comparison(
    methods: list[str],  # names in `ALL_METHODS`
    head: str,  # 'classification' or 'verbalizer'
    seeds: int,  # number of seeds
) -> None:
    """Check that the methods, the head and the number of seeds can be compared.

    Raises: `UserError` if not.
    """
    for method in methods:
        check_name(method, ALL_METHODS, "method")
        if ALL_METHODS[method].kind == "entailment" and head == "verbalizer":
            raise UserError(
                f"{method!r} has its own entailment head, so it cannot use head='verbalizer'. "
                "Leave it out of methods=..., or use head='classification'."
            )
    if seeds < 1:
        raise UserError(
            f"seeds must be at least 1, and at least 2 for a standard deviation, got {seeds}."
        )
    check_between(seeds, 1, 10**6, "seeds")


def _encode_longest_row(cfg: RunConfig, bb: Backbone, task: Task) -> dict:
    """Return the encoded example with the most tokens over all splits."""
    rows = [r for split in task.splits.values() for r in split]
    template = cfg.template if cfg.head == "verbalizer" or task.is_generation else None
    examples = encode_rows(task, rows, bb, cfg.max_len, template)
    return max(examples, key=lambda example: len(example["input_ids"]))


def dry_run_comparison(
    methods: list[str],  # names in `ALL_METHODS`
    base: RunConfig,  # options that all methods share
    seeds: int,  # number of seeds
    folder: Path | str,  # output folder; it must be writable, and nothing is written
) -> None:
    """Run every method once on the longest example, without training or writing anything."""
    validate_comparison(methods, base.head, seeds)
    refuse_unread_options(methods, base, base.prompt_length)
    check_writable_folder(folder)
    task = load_task(base.task, base.data, base.shots, base.split_seed, base.stratified)
    longest = None
    for method in methods:
        cfg = replace(base, method=method)
        bb = load_config_backbone(cfg)
        model = build_model(cfg, bb, task).eval()
        if cfg.init_from:
            load_first_stage(model, cfg.init_from)
        if longest is None:
            longest = _encode_longest_row(base, bb, task)
        with torch.no_grad():  # fails if example and prompt do not fit
            model(collate([longest], bb.tokenizer.pad_token_id or 0))
