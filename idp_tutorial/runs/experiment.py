"""Train and score one config and return its record.

The other packages provide the parts. A run turns the name of a method into a trained model and
a *record*: one line of JSON with everything that is needed to trust the score.

The checkpoint is chosen on the validation split; the test split is scored once, at the end. The
record states how the checkpoint was chosen.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.controls import ALL_METHODS, ControlModel, fit_control
from idp_tutorial.assembly.options import refuse_control
from idp_tutorial.assembly.probe import initialise_head_from_probe
from idp_tutorial.core.backbone import backbone_fingerprint
from idp_tutorial.core.prompted_model import PromptedModel, count_parameters
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.logits import logits_name, save_logits
from idp_tutorial.runs.record_checks import (
    data_digest,
    downsample_losses,
    input_digests,
    provenance_field,
    split_outputs,
)
from idp_tutorial.saving.descriptions import describe_run, read_prompts
from idp_tutorial.saving.first_stage import load_first_stage
from idp_tutorial.saving.hub import RECORD_FILE, read_run_record
from idp_tutorial.saving.prompt_files import PROMPTS_FILE, save_pretrained
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import DivergenceError, UserError, check_at_least, check_name
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.durable import dump_record, folder_lock, write_atomically
from idp_tutorial.utils.provenance import SCHEMA_VERSION, git_state
from idp_tutorial.utils.records import append_record, collect_versions, config_to_record

__all__ = [
    "make_record",
    "initialise_model",
    "train_model",
    "make_diverged_record",
    "run_or_record_failure",
    "run_experiment",
    "format_summary_line",
    "train_and_save",
]


def _count_steps(training_log: dict, cfg: RunConfig) -> dict:
    """Return the fields for the number of steps: planned and, after early stopping, done."""
    if cfg.patience and 0 < training_log["steps"] < cfg.steps:
        return dict(steps=cfg.steps, steps_done=training_log["steps"])
    return dict(steps=training_log["steps"])


def make_record(
    model: PromptedModel,  # trained
    training_log: dict,  # from `fit` or `fit_control`
    task: Task,
    cfg: RunConfig,
    score_test: bool = True,  # score the test split
    # JSONL file of the record; logits on validation and test are stored beside it
    records_file: Path | None = None,
) -> dict:
    """Return the record of a run: config, scores, parameter counts, time, memory and versions."""
    bb = model.backbone
    splits = [*["validation"] * bool(records_file), *["test"] * score_test]
    outputs = {split: split_outputs(model, task, cfg, split) for split in splits}
    scores: dict[str, Any] = {task.metric: None}
    if score_test:
        scores, _ = task.score_outputs(*outputs["test"])
    digests = dict(
        weights=bb.initial_fingerprint(),
        data=data_digest(task, score_test),
        **input_digests(cfg),
    )
    record = {
        "schema": SCHEMA_VERSION,
        "status": "done",
        **config_to_record(cfg),
        **bb.weights_info,
    }
    if records_file:
        name = logits_name(cfg, task, digests["weights"])
        record |= save_logits(records_file, name, outputs, task)
    record |= {
        "digests": digests,
        "metric": task.metric,
        "score": scores[task.metric],
        "scores": scores,
        "validation": training_log["validation"],
        "checkpoint_selection": "checkpoint: best on validation"
        + "; reported on test" * score_test,
        "split_sizes": task.split_sizes(),
        "n_layers": bb.n_layers,
        "params": count_parameters(model),
        **_count_steps(training_log, cfg),
        "ms_per_step": round(training_log["ms_per_step"], 2),
        "peak_memory_mb": round(training_log["peak_memory_mb"], 1),
        "history": training_log["history"],
        "losses": downsample_losses(training_log["losses"]),
    }
    if "probe" in training_log:  # what the probe control chose
        record["probe"] = training_log["probe"]
    record["versions"] = collect_versions()
    return record


def _with_default_learning_rate(cfg: RunConfig) -> RunConfig:
    """Return the config with the method's default learning rate where none is given or used."""
    method = ALL_METHODS[check_name(cfg.method, ALL_METHODS, "method")]
    uses_given_lr = cfg.lr is not None and method.learning_rates
    return cfg if uses_given_lr else replace(cfg, lr=method.default_learning_rate)


def _resolve_task_and_config(cfg: RunConfig, task: Task | None) -> tuple[Task, RunConfig]:
    """Return the task, loaded if necessary, and the config with its name and number of steps."""
    task = task or load_task(cfg.task, cfg.data, cfg.shots, cfg.split_seed, cfg.stratified)
    cfg = replace(_with_default_learning_rate(cfg), task=task.name)
    return task, cfg.resolve_epochs(len(task.splits["train"]), PartialState().num_processes)


def initialise_model(
    model: PromptedModel,  # changed in place
    task: Task,
    cfg: RunConfig,
) -> PromptedModel:  # `model`
    """Initialise prompts from an earlier stage, and the head from the linear probe, if asked to.

    `cfg.init_from` is the folder of the earlier stage; `cfg.head_init` 'probe' initialises the
    head. The heads of controls and of entailment methods have other outputs and are left unchanged.
    """
    if cfg.init_from:
        load_first_stage(model, cfg.init_from)
    if cfg.head_init == "probe" and ALL_METHODS[cfg.method].kind not in ("control", "entailment"):
        initialise_head_from_probe(model, task, cfg)
    return model


def _read_or_none(read: Callable, *args: Any) -> Any:
    """Return what `read` returns, or None if the file is missing or damaged."""
    try:
        return read(*args)
    except (ValueError, FileNotFoundError):
        return None


def _comparable_settings(cfg: dict, digests: dict) -> dict:
    """Return the settings in which two runs must agree if one may replace the other."""
    settings = {name: value for name, value in cfg.items() if name != "device"}
    for name in ("backbone", "glove"):
        settings[name] = cfg.get(name) and Path(cfg[name]).name
    for name, digest in digests.items():  # `glove` and `init_from` are also names of settings
        settings[f"digest of {name}" if name in ("glove", "init_from") else name] = digest
    return settings


def _check_same_run(folder: Path, task: Task, cfg: RunConfig, weights: str) -> None:
    """Check that a finished model in `folder`, if there is one, is of the same run."""
    contents = _read_or_none(read_prompts, folder)
    if contents is None:
        return
    saved_cfg = contents[0]["cfg"]
    saved_record = _read_or_none(read_run_record, folder, saved_cfg) or {}
    saved = _comparable_settings(saved_cfg, saved_record.get("digests", {}))
    digests = dict(weights=weights, data=data_digest(task), **input_digests(cfg))
    current = _comparable_settings(describe_run(task, cfg)["cfg"], digests)
    current = json.loads(json.dumps(current))  # tuples become lists, as in the saved file
    differences = [
        f"{name} was {saved[name]!r} and is now {current[name]!r}"
        for name in saved
        if name in current and saved[name] != current[name]
    ]
    if differences:
        raise UserError(
            f"{folder} holds another run ({', '.join(differences)}): use another folder or the "
            f"same settings, or delete its {PROMPTS_FILE} and checkpoints to start again."
        )


def train_model(
    cfg: RunConfig,
    task: Task,
    folder: Path | None = None,  # folder of the run; it must not hold another run
    **fit_kwargs: Any,  # `checkpoint_dir` and `save_every` of `fit`; unused by controls
) -> tuple[PromptedModel, dict]:  # the trained model, and the log that `fit` returned
    """Build the model of a config on a newly loaded backbone and train it.

    Raises: `DivergenceError` for a loss that is not finite, `UserError` if the folder holds
    another run.
    """
    git_state()  # its cached result is the state at the start of the run, not at the end
    bb = load_config_backbone(cfg)
    weights = bb.initial_fingerprint()  # before anything is trained
    if folder:
        _check_same_run(folder, task, cfg, weights)
    model = initialise_model(build_model(cfg, bb, task), task, cfg)
    if isinstance(model, ControlModel):
        return model, fit_control(model, task, cfg)
    return model, fit(model, task, cfg, **fit_kwargs)


def make_diverged_record(
    cfg: RunConfig,
    task: Task,
    error: Exception | str,  # why the run ended
    start_time: float,  # `time.time()` at the start
    score_test: bool = True,  # False: the test split is not read
) -> dict:  # its `status` is 'diverged', its `message` the error
    """Return the record of a run that diverged."""
    return {
        "schema": SCHEMA_VERSION,
        "status": "diverged",
        "message": str(error),
        **config_to_record(cfg),
        "digests": dict(
            weights=backbone_fingerprint(load_config_backbone(cfg)),
            data=data_digest(task, score_test),
            **input_digests(cfg),
        ),
        "metric": task.metric,
        "split_sizes": task.split_sizes(),
        "versions": collect_versions(),
        **provenance_field(start_time),
    }


def run_or_record_failure(
    cfg: RunConfig,
    task: Task | None = None,  # a loaded task, whose name goes into the record; None: `cfg.task`
    # JSONL file of the record, which is not written; logits are stored beside it
    records_file: Path | None = None,
) -> dict:  # the record; its `status` is 'done' or 'diverged'
    """Train and score one config; return a record even if the run diverges."""
    task, cfg = _resolve_task_and_config(cfg, task)
    start_time = time.time()
    try:
        model, training_log = train_model(cfg, task)
        record = make_record(model, training_log, task, cfg, records_file=records_file)
    except FloatingPointError as e:
        return make_diverged_record(cfg, task, e, start_time)
    return {**record, **provenance_field(start_time)}


def run_experiment(
    cfg: RunConfig,
    task: Task | None = None,  # a loaded task, whose name goes into the record; None: `cfg.task`
    append_to: Path | None = None,  # JSONL file to which the record is added
    # JSONL file for a caller that adds the record itself: logits are stored beside it, and only
    # the record of a run that diverged is added
    records_file: Path | None = None,
) -> dict:
    """Train and score one config and return its record.

    Raises: `DivergenceError` if the run diverges, after its record was added to the file.
    """
    file = append_to or records_file
    record = run_or_record_failure(cfg, task, file)
    is_diverged = record.get("status") == "diverged"
    if file and (append_to or is_diverged):
        append_record(record, file)
    if is_diverged:
        raise DivergenceError(record["message"])
    return record


def format_summary_line(
    record: dict,  # of a run
) -> str:
    """Return the learning rate, if there is one, and the score of a run as one line."""
    lr = f"lr {record['lr']:.1e}  " if record.get("lr") else ""
    if record.get("status", "done") != "done":
        return f"{lr}diverged: {record['message']}"
    return f"{lr}{record['metric']} {record['score']:.1f}"


def train_and_save(
    cfg: RunConfig,
    folder: Path | str,  # folder of this run
    task: Task | None = None,  # a loaded task, whose name goes into the record; None: `cfg.task`
    # steps between two checkpoints; None: `cfg.eval_every`; 0: no checkpoints
    save_every: int | None = None,
    **extra_fields: Any,  # further fields of the record
) -> dict:  # the record
    """Train one config, or resume it, and save the trained model and its record in a folder.

    Raises: `DivergenceError` if the run diverges, `UserError` for a control or if the folder
    holds another run.
    """
    refuse_control(cfg.method)
    task, cfg = _resolve_task_and_config(cfg, task)
    folder = Path(folder)
    if save_every is not None:
        check_at_least(save_every, 0, "save_every")
    is_main_process = PartialState().is_main_process
    start_time = time.time()
    with folder_lock(folder if is_main_process else None):
        try:
            model, training_log = train_model(
                cfg,
                task,
                folder,
                checkpoint_dir=None if save_every == 0 else folder,
                save_every=save_every,
            )
            record = {
                **make_record(model, training_log, task, cfg),
                **provenance_field(start_time),
                **extra_fields,
            }
        except FloatingPointError as e:
            # The folder stays free for a run with another learning rate, whose record replaces this
            # one. If it has an earlier model, that model's record stays.
            if is_main_process and not (folder / PROMPTS_FILE).exists():
                diverged = make_diverged_record(cfg, task, e, start_time)
                line = dump_record({**diverged, **extra_fields}) + "\n"
                write_atomically(folder / RECORD_FILE, line.encode())
            raise
        save_pretrained(model, folder, task, cfg, record)
    return record
