"""Training of several methods with the same head, steps, seeds and choice of a learning rate.

A table of methods is only as fair as its least tuned method. Here every method gets the same
number of learning rates, which are compared on the validation split with seed 0 before any test
score is computed. The best one is then used with every seed.

A comparison may run for a night. So its methods, head and output folder are checked first, and
whether the longest example fits: every method is built once and processes the longest example
of the task. Every record is written as soon as its run ends; a second call with the same settings
reads the records and runs what is missing (`RunStore`). Until its record is written, a run has
checkpoints in a hidden folder beside the records, so a kill loses at most the steps since the last
evaluation, also in the search of a learning rate.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import (
    RunConfig,
    RunOptions,
    config_for_method,
    refuse_unread_options,
)
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.conclusions import parse_primary_contrast
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.learning_rate_search import (
    choose_head_learning_rate,
    describe_lr_selection,
    search_learning_rate,
)
from idp_tutorial.runs.record import (
    RunStore,
    checkpoint_folder,
    format_summary_line,
    make_fingerprint,
    remove_checkpoints,
    run_digests,
)
from idp_tutorial.runs.tables import select_finished, write_results
from idp_tutorial.saving.prompt_files import load_first_stage
from idp_tutorial.training.evaluation import predict_logits
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.checks import (
    DivergenceError,
    Range,
    UserError,
    check_name,
    check_writable_folder,
    require_packages,
)
from idp_tutorial.utils.durable_files import folder_lock, write_atomically
from idp_tutorial.utils.records import dump_record, read_existing_records

__all__ = [
    "OTHER_RECORDS_FILE",
    "validate_comparison",
    "check_longest_example",
    "dry_run_comparison",
    "run_seeds",
    "choose_method_config",
    "compare_methods",
    "compare_and_write",
]

logger = logging.getLogger(__name__)


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
    Range(1, hint="at least 2 for a standard deviation").check(seeds, "seeds")


def _text_length(row: dict) -> int:
    """Return the number of characters of a row."""
    return len(row["sentence1"]) + len(row.get("sentence2", ""))


def check_longest_example(model: PromptedModel, task: Task, cfg: RunConfig) -> None:
    """Process the longest example of a task, so that one that does not fit fails at once.

    Of the 50 rows with the most characters, it is the one with the most tokens.
    """
    rows = [row for split in task.splits.values() for row in split]
    longest_rows = sorted(rows, key=_text_length)[-50:]
    examples = encode_for_model(model, task, cfg, longest_rows)
    longest = max(examples, key=lambda example: len(example["input_ids"]))
    predict_logits(model, [longest], device=next(model.parameters()).device)


def dry_run_comparison(
    methods: list[str],  # names in `ALL_METHODS`
    base: RunOptions,  # options that all methods share
    seeds: int,  # number of seeds
    folder: Path | str,  # output folder; it must be writable, and nothing is written
) -> None:
    """Run every method once on the longest example, without training or writing anything."""
    validate_comparison(methods, base.head, seeds)
    refuse_unread_options(methods, base)
    check_writable_folder(folder)
    task = load_config_task(base)
    task = task.with_metric(base.metric)
    for method in methods:
        cfg = config_for_method(base, method, methods)
        model = build_model(cfg, load_config_backbone(cfg), task)
        if cfg.init_from:
            load_first_stage(model, cfg.init_from)
        check_longest_example(model, task, cfg)


def _run_seed(
    cfg: RunConfig,  # with the seed
    task: Task,
    records_file: Path | None,
    learning_rates: tuple,  # to search if `cfg.lr` is None; (): the method's own
    checkpoint_dir: Path | None,
) -> dict:
    """Train with one seed and return its record; without a learning rate, search one first."""
    if cfg.lr or not ALL_METHODS[cfg.method].learning_rates:
        _, record = Experiment(cfg, task).train(records_file, checkpoint_dir)
        return record.to_dict()
    return search_learning_rate(
        replace(cfg, seed=0),  # the best run of the search is the run with seed 0
        task,
        learning_rates,
        score_test=True,
        records_file=records_file,
        checkpoint_dir=checkpoint_dir,
    )


def run_seeds(
    # everything but the seed; `lr=None`: a learning rate is searched with the first seed
    cfg: RunConfig,
    task: Task,  # with its splits
    lr_selection: str,  # text for the records: how the learning rate is chosen
    seeds: int,  # number of seeds
    store: RunStore,  # what it contains is not run again
    learning_rates: tuple = (),  # learning rates to search; (): the method's own
    first_seed: int = 0,  # the others follow it
    **extra_fields: Any,  # added to new records
) -> list[dict]:  # one record per seed; only one if every learning rate diverged
    """Train a config with every seed, all with the same learning rate."""
    cfg = replace(cfg, task=task.name)
    task = task.with_metric(cfg.metric)
    digests = run_digests(cfg, task)
    layer = "" if cfg.get("layer") is None else f"layer {cfg.get('layer')}  "
    needs_lr = bool(ALL_METHODS[cfg.method].learning_rates)
    records: list[dict] = []
    lr = cfg.lr
    for seed in range(first_seed, first_seed + seeds):
        if records and needs_lr and not lr:
            break  # every learning rate diverged with the first seed
        seed_cfg = replace(cfg, lr=lr if needs_lr else None, seed=seed)
        fingerprint = make_fingerprint(seed_cfg, digests, lr_selection=lr_selection)
        checkpoint_dir = checkpoint_folder(store.file, fingerprint)
        title = f"{cfg.method:16} {layer}seed {seed}"
        record = store.find(fingerprint)
        if record:
            logger.debug(f"{title}  stored", extra={"run_status": "stored"})
        else:
            start = time.perf_counter()
            if records and not needs_lr:  # a control, which does not depend on the seed
                record = {**records[0], "seed": seed}
            else:
                record = _run_seed(seed_cfg, task, store.file, learning_rates, checkpoint_dir)
            seconds = round(time.perf_counter() - start, 1)
            is_search = needs_lr and not seed_cfg.lr
            record |= dict(
                **extra_fields,
                lr_selection=lr_selection,
                seconds=0.0 if is_search else seconds,
                tuning_seconds=seconds if is_search else 0.0,
            )
            summary = format_summary_line(record)
            logger.info(f"{title}  {summary}", extra={"run_status": "trained"})
            record = store.add({**record, **fingerprint})
        remove_checkpoints(checkpoint_dir)
        lr = record["lr"] or lr
        records.append(record)
    return records


def choose_method_config(
    base: RunOptions,  # `lr` None: searched or the default; `head_lr` is used beside a prompt
    method: str,
    methods: Sequence[str],  # all methods of the comparison, `method` among them
    tune_learning_rates: bool,  # search a learning rate, if `base` gives none
) -> RunConfig:
    """Return the config of one method of a comparison; `lr` is None if it is to be searched."""
    row = ALL_METHODS[method]
    lr = base.lr or (None if tune_learning_rates else row.default_learning_rate)
    return config_for_method(
        base,
        method,
        methods,
        lr=lr if row.learning_rates else None,
        head_lr=None if row.kind in ("head", "control") else base.head_lr,
    )


def compare_methods(
    methods: list[str],  # names in `ALL_METHODS`
    base: RunOptions,  # everything but method, learning rate and seed
    seeds: int = 3,  # seeds 0 to seeds - 1
    tune_learning_rates: bool = True,  # search one for each method, if `base` gives none
    out: Path | None = None,  # JSONL file; its records are not run again, and new ones are appended
    # search the learning rate of the head without a prompt first, and use it for every method
    tune_head_first: bool = False,
    previous_records: Sequence[dict] = (),  # records of earlier runs, which are not run again
    # learning rates that every method tries, and more if the best is at an edge; (): each
    # method's own three
    learning_rates: tuple = (),
    **extra_fields: Any,  # added to new records
) -> list[dict]:  # one record per method and seed
    """Train every method with every seed on one task.

    Raises: `DivergenceError` if the head alone diverges with every learning rate that it tries.
    """
    methods = list(dict.fromkeys(methods))
    validate_comparison(methods, base.head, seeds)
    task = load_config_task(base)
    base = base.resolve_epochs(len(task.splits["train"]))
    lr_selection = describe_lr_selection(learning_rates, base.lr, tune_learning_rates)
    store = RunStore(out, previous_records)

    def run_method(method: str) -> list[dict]:
        """Run all seeds of a method."""
        cfg = choose_method_config(base, method, methods, tune_learning_rates)
        return run_seeds(cfg, task, lr_selection, seeds, store, learning_rates, **extra_fields)

    records: dict[str, list[dict]] = {}
    tunes_every_head = tune_learning_rates and not base.lr and base.head != "verbalizer"
    if tune_head_first and tunes_every_head and "head-only" in methods:
        # its learning rate is the head's for every method
        records["head-only"] = run_method("head-only")
        first = records["head-only"][0]
        if first["lr"] is None:
            raise DivergenceError(first["message"])
        base = replace(base, head_lr=first["lr"])
    elif tune_head_first:
        base = replace(base, head_lr=choose_head_learning_rate(base, task, out))
    for method in methods:
        if method not in records:
            records[method] = run_method(method)
    return [r for method in methods for r in records[method]]


OTHER_RECORDS_FILE = "earlier.jsonl"  # beside `compare.jsonl`: records of other comparisons


def _configs_per_split_seed(base: RunOptions, split_seeds: int) -> list[RunOptions]:
    """Return a config for each few-shot sample, beginning with the split seed of `base`."""
    Range(1).check(split_seeds, "split_seeds")
    if split_seeds > 1 and base.shots is None:
        raise UserError(
            f"split_seeds={split_seeds} needs shots=..., because without it all training examples "
            "are used and nothing is sampled. Give shots, such as shots=100, or leave split_seeds "
            "out."
        )
    frozen = Path(base.data) / base.task / f"k{base.shots}" if base.data else None
    if split_seeds > 1 and frozen and frozen.is_dir():
        raise UserError(
            f"split_seeds={split_seeds} is not possible with the few-shot set {frozen}, because "
            "each split seed would give the same examples. Leave split_seeds out, or rename the "
            "folder."
        )
    return [replace(base, split_seed=base.split_seed + i) for i in range(split_seeds)]


def _keep_other_records(folder: Path, stored: list[dict], records: list[dict]) -> None:
    """Move stored records that are not of this comparison to `OTHER_RECORDS_FILE`."""
    lines = [dump_record(r) + "\n" for r in stored if r not in records]
    if lines:
        file = folder / OTHER_RECORDS_FILE
        write_atomically(file, "".join(dict.fromkeys(lines)).encode())
        logger.info(f"records of other comparisons are kept in {file}")


def compare_and_write(
    methods: list[str],  # names in `ALL_METHODS`
    base: RunOptions,  # everything but method, learning rate and seed
    seeds: int,  # number of seeds
    tune_learning_rates: bool,  # search a learning rate for each method, if `base` gives none
    folder: Path | str,  # output folder
    tune_head_first: bool = False,  # as in `compare_methods`
    learning_rates: tuple = (),  # as in `compare_methods`
    primary_contrast: str | None = None,  # 'A - B': the contrast that new records are made for
    split_seeds: int = 1,  # number of few-shot samples, each with all seeds and its own search
) -> pd.DataFrame:  # from `results_table`
    """Compare methods, and write `compare.jsonl`, `compare.csv` and `compare.png` to a folder.

    A comparison that was interrupted continues from its records in the folder. Raises
    `DivergenceError` if every run diverged.
    """
    require_packages("matplotlib", "adjustText")  # `write_results` needs them after the training
    folder = Path(folder)
    part = folder / "compare.jsonl.part"
    extra_fields: dict[str, Any] = {}
    if primary_contrast:
        sides = parse_primary_contrast(primary_contrast, methods)
        extra_fields = {"primary": " - ".join(sides)}
    configs = _configs_per_split_seed(base, split_seeds)
    dry_run_comparison(methods, base, seeds, folder)
    with folder_lock(folder):
        try:
            stored = []
            for name in (OTHER_RECORDS_FILE, part.name, "compare.jsonl"):
                stored += read_existing_records(folder / name)
            records = []
            for cfg in configs:
                records += compare_methods(
                    methods,
                    cfg,
                    seeds,
                    tune_learning_rates,
                    part,
                    tune_head_first,
                    stored,
                    learning_rates,
                    **extra_fields,
                )
            if not select_finished(records):
                raise DivergenceError(records[0]["message"])
        except BaseException:  # also Ctrl-C
            if part.exists():
                logger.info(
                    f"interrupted; the finished runs are in {part}, and the same command continues "
                    "from them"
                )
            raise
        _keep_other_records(folder, stored, records)
        table = write_results(records, folder / "compare")
        part.unlink(missing_ok=True)
    return table
