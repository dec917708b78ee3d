"""Train, score and save one config: the one pipeline of commands, comparisons and estimators.

The other packages provide the parts. An experiment turns the name of a method into a trained
model and a *record*: one line of JSON with everything that is needed to trust the score.

The checkpoint is chosen on the validation split; the test split is scored once, at the end. The
record states how the checkpoint was chosen.
"""

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import RunConfig, find_unused_options, refuse_control
from idp_tutorial.assembly.controls import ControlConfig, ControlModel
from idp_tutorial.assembly.probe import initialise_head_from_probe
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.planned_model import PlannedModel, restore_state, trained_state
from idp_tutorial.core.random_numbers import exclusive_random_numbers
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.logits import logits_name, save_logits, split_outputs
from idp_tutorial.runs.record import (
    build_record,
    make_fingerprint,
    run_digests,
)
from idp_tutorial.runs.report import require_reportable, write_report
from idp_tutorial.saving.descriptions import read_fingerprint, tensor_shapes
from idp_tutorial.saving.hub import RECORD_FILE
from idp_tutorial.saving.prompt_files import load_first_stage, save_pretrained
from idp_tutorial.training.distributed import create_accelerator
from idp_tutorial.training.evaluation import format_predictions
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import DivergenceError, UserError, check_name
from idp_tutorial.utils.digests import compute_digest
from idp_tutorial.utils.durable_files import folder_lock, write_atomically
from idp_tutorial.utils.process import process_state
from idp_tutorial.utils.records import append_record, describe_differences, dump_record, git_state
from idp_tutorial.utils.tensor_files import PROMPTS_FILE, remove_snapshots

REPORT_FOLDER = "report"  # in the folder of a trained model; a repository on the hub lacks it


class Experiment:
    """A config and its task, from which a model is trained, scored and saved."""

    def __init__(
        self,
        cfg: RunConfig,  # without `lr` the method's default is used
        task: Task | None = None,  # a loaded task, whose name goes into the record; None: load it
    ) -> None:
        task = task or load_config_task(cfg)
        self.task = task.with_metric(cfg.metric)
        method = ALL_METHODS[check_name(cfg.method, ALL_METHODS, "method")]
        has_lr = cfg.lr is not None and method.learning_rates
        lr = cfg.lr if has_lr else method.default_learning_rate
        cfg = replace(cfg, lr=lr, task=self.task.name)
        n_examples = len(self.task.splits["train"])
        self.cfg = cfg.resolve_epochs(n_examples, process_state().num_processes)
        self.start_time = time.perf_counter()
        self.backbone_id: str | None = None  # of the backbone before training, once it is loaded
        self.test_outputs: Any = None  # outputs for the test split, once it is scored

    def digests(self, include_test: bool = True) -> dict[str, str]:
        """Return the digests of everything that the experiment reads."""
        digests = run_digests(self.cfg, self.task, include_test, self.backbone_id)
        self.backbone_id = digests["weights"]
        return digests

    def build_model(self) -> PlannedModel:
        """Build the untrained model on a newly loaded backbone.

        Prompts start from an earlier stage (`init_from`), and the head from the linear probe
        (`head_init='probe'`), if the config asks for it. The heads of controls and of entailment
        methods have other outputs and are left unchanged.
        """
        cfg = self.cfg
        git_state()  # its cached result is the state at the start of the run, not at the end
        bb = load_config_backbone(cfg)
        self.backbone_id = backbone_id(bb)  # before anything is trained
        # what the command refuses; a protocol may set an option of all runs for all its methods
        unused = find_unused_options([replace(cfg, init_from=None)], bb)
        for name in unused.keys() & ALL_METHODS[cfg.method].options.keys():
            warnings.warn(unused[name], stacklevel=2)
        model = build_model(cfg, bb, self.task)
        if cfg.init_from:
            load_first_stage(model, cfg.init_from)
        kind = ALL_METHODS[cfg.method].kind
        if cfg.head_init == "probe" and kind not in ("control", "entailment"):
            initialise_head_from_probe(model, self.task, cfg)
        return model

    @exclusive_random_numbers()  # from the seed in `build_model` to the last step
    def fit(
        self,
        checkpoint_dir: Path | None = None,  # folder for checkpoints; unused by controls
        save_every: int | None = None,  # steps between two checkpoints; None: `cfg.eval_every`
        initial_state: Mapping[str, Tensor] | None = None,  # trained tensors to begin with, by name
        **fit_options: Any,  # `callbacks` and `progress` of `fit`
    ) -> tuple[PlannedModel, TrainLog]:
        """Build the model and train it, without scoring it.

        Raises: `DivergenceError` for a loss that is not finite.
        """
        self.start_time = time.perf_counter()
        model = self.build_model()
        if initial_state:
            state = trained_state(model)
            if tensor_shapes(state) != tensor_shapes(initial_state):
                raise UserError(
                    "the earlier model has other trained tensors: use the same options of the "
                    "method and the head, or warm_start=False."
                )
            restore_state(state, initial_state)
            if checkpoint_dir:  # a run from other tensors is another run
                tensors = (t.detach().cpu().contiguous() for t in initial_state.values())
                blocks = (t.reshape(-1).view(torch.uint8).numpy() for t in tensors)
                checkpoint_dir = Path(checkpoint_dir) / f"from-{compute_digest(blocks)}"
        control = self.cfg.method_config
        if isinstance(control, ControlConfig) and isinstance(model, ControlModel):
            model.to(create_accelerator(self.cfg).device)
            return model, control.fit(model, self.task, self.cfg)
        return model, fit(
            model,
            self.task,
            self.cfg,
            checkpoint_dir=checkpoint_dir,
            save_every=save_every,
            **fit_options,
        )

    def score(
        self,
        model: PlannedModel,  # trained
        log: TrainLog,
        score_test: bool = True,  # score the test split
        # JSONL file of the record; logits on validation and test are stored beside it
        records_file: Path | None = None,
        **details: Any,  # further fields of the record
    ) -> dict[str, Any]:
        """Score a trained model and return the record of its run."""
        task = self.task
        splits = [*["validation"] * bool(records_file), *["test"] * score_test]
        outputs = {}
        seconds = 1e-9
        for split in splits:
            start_time = time.perf_counter()
            known = log.validation_outputs if split == "validation" else None
            outputs[split] = split_outputs(model, task, self.cfg, split, known)
            seconds = time.perf_counter() - start_time  # the test split is the last
        digests = self.digests(score_test)
        if records_file:
            name = logits_name(self.cfg, task, digests)
            details |= save_logits(records_file, name, outputs, task)
        if score_test:
            self.test_outputs = outputs["test"][0]
            scores, _ = task.score_outputs(*outputs["test"])
            details |= dict(score=scores[task.metric], scores=scores)
        selection = "checkpoint: best on validation" + "; reported on test" * score_test
        tensors = trained_state(model).values()
        record = build_record(
            self.cfg,
            digests,
            task.split_sizes(),
            self.start_time,
            model,
            log,
            **dict(metric=task.metric, checkpoint_selection=selection) | details,
        )
        # beside what depends on the machine, so that records of one run stay comparable
        record["provenance"]["file_bytes"] = sum(t.numel() * t.element_size() for t in tensors)
        if score_test:
            texts_per_second = len(task.splits["test"]) / seconds
            record["provenance"]["texts_per_second"] = round(texts_per_second, 1)
        return record

    def record_divergence(
        self,
        error: Exception | str,  # why the run ended
        score_test: bool = True,  # False: the test split is not read
        **details: Any,  # further fields of the record
    ) -> dict[str, Any]:
        """Return the record of a run that diverged."""
        return build_record(
            self.cfg,
            self.digests(score_test),
            self.task.split_sizes(),
            self.start_time,
            **dict(status="diverged", message=str(error), metric=self.task.metric) | details,
        )

    def train(
        self,
        records_file: Path | None = None,  # as for `score`; the record is not written
        checkpoint_dir: Path | None = None,  # folder for checkpoints, to resume a killed run
    ) -> tuple[PlannedModel | None, dict[str, Any]]:  # no model if the run diverged
        """Train and score a model; the record says so if the run diverges."""
        try:
            model, log = self.fit(checkpoint_dir)
            return model, self.score(model, log, records_file=records_file)
        except FloatingPointError as e:
            return None, self.record_divergence(e)

    def check_folder(self, folder: Path) -> None:
        """Check that a finished model in `folder`, if there is one, is of the same run.

        Raises: `UserError` if it is of another run.
        """
        saved = read_fingerprint(folder)
        if not saved:
            return
        current = make_fingerprint(self.cfg, self.digests())
        for fingerprint in (saved, current):  # a message names each digest by itself
            fingerprint |= fingerprint.pop("digests")
        differences = describe_differences(saved, current)
        if differences:
            raise UserError(
                f"{folder} holds another run ({differences}): use another folder or the same "
                f"settings, or delete its {PROMPTS_FILE} and checkpoints to start again."
            )


def run_experiment(
    cfg: RunConfig,
    task: Task | None = None,  # a loaded task, whose name goes into the record; None: `cfg.task`
    append_to: Path | None = None,  # JSONL file to which the record is added
) -> dict[str, Any]:
    """Train and score one config and return its record.

    Raises: `DivergenceError` if the run diverges, after its record was added to the file.
    """
    _, record = Experiment(cfg, task).train(append_to)
    if append_to:
        append_record(record, append_to)
    if record["status"] == "diverged":
        raise DivergenceError(record["message"])
    return record


_MAX_PROBE_EXAMPLES = 5000  # with more, a probe takes minutes


def score_controls(
    cfg: RunConfig,  # of a run without the controls
    task: Task | None = None,  # None: `cfg.task`
    split: Literal["test", "validation"] = "test",
) -> dict[str, float]:  # name: score; {} for a task that the controls cannot learn
    """Score the controls that take seconds, `words` and `probe`, on the task of a run.

    The probe is left out for more than 5,000 training examples.
    """
    task = task or load_config_task(cfg)
    if task.is_generation:
        return {}
    n_examples = len(task.splits["train"])
    scores = {}
    for method in ("words", "probe") if n_examples <= _MAX_PROBE_EXAMPLES else ("words",):
        experiment = Experiment(cfg.with_method(method, lr=None, init_from=None), task)
        try:
            if split == "validation":
                scores[method] = experiment.fit()[1].validation
            else:
                scores[method] = experiment.train()[1]["score"]
        except UserError:  # such as training examples of one class
            return {}
    return scores


def warn_of_better_controls(
    method: str,  # that was trained
    score: float,
    controls: Mapping[str, float],  # from `score_controls`, on the same rows
) -> str:  # "" if none is better
    """Return a warning that names the controls that score higher than a method."""
    better = [name for name, control_score in controls.items() if control_score > score]
    if not better:
        return ""
    return (
        f"{method} ({score:.1f}) scores lower than {' and '.join(better)}: compare with "
        "`idp compare` before you use it"
    )


def write_test_report(
    task: Task,
    outputs: Tensor,  # of the test split, from `predict_logits`
    folder: Path,  # the report is written to REPORT_FOLDER in it
    method: str,  # method that has these outputs, for the title
    curves: Mapping[str, dict],  # as for `write_report`
    introduction: str = "",  # as for `write_report`
) -> None:
    """Write the report on the test split of a task."""
    rows = task.splits["test"]
    predictions = format_predictions(task, outputs, [row.get("group") for row in rows])
    title = f"{method} on {task.name}, test"
    write_report(task, rows, predictions, folder / REPORT_FOLDER, title, introduction, curves)


def train_and_save(
    cfg: RunConfig,
    folder: Path | str,  # folder of this run
    task: Task | None = None,  # a loaded task, whose name goes into the record; None: `cfg.task`
    # steps between two checkpoints; None: `cfg.eval_every`; 0: no checkpoints
    save_every: int | None = None,
    report: bool = False,  # write a report on the test split to the folder REPORT_FOLDER in it
    callbacks: Iterable = (),  # `transformers.TrainerCallback` objects, as of `Trainer`
    progress: bool | None = None,  # show a progress bar; None: if stderr is a terminal
    **details: Any,  # further fields of the record
) -> dict[str, Any]:  # the record
    """Train one config, or resume it, and save the trained model and its record in a folder.

    Raises: `DivergenceError` if the run diverges, `UserError` for a control or if the folder
    holds another run.
    """
    refuse_control(cfg.method)
    folder = Path(folder)
    experiment = Experiment(cfg, task)
    if report:
        require_reportable(experiment.task)
    is_main_process = process_state().is_main_process
    checkpoint_dir = None if save_every == 0 else folder
    with folder_lock(folder if is_main_process else None):
        experiment.check_folder(folder)
        try:
            model, log = experiment.fit(
                checkpoint_dir, save_every, callbacks=callbacks, progress=progress
            )
            record = experiment.score(model, log, **details)
        except FloatingPointError as e:
            # The folder stays free for a run with another learning rate, whose record replaces
            # this one. If it has an earlier model, that model's record stays.
            if is_main_process:
                remove_snapshots(folder)
            if is_main_process and not (folder / PROMPTS_FILE).exists():
                line = dump_record(experiment.record_divergence(e, **details)) + "\n"
                write_atomically(folder / RECORD_FILE, line.encode())
            raise
        save_pretrained(model, folder, experiment.task, experiment.cfg, record)
        if report and is_main_process:
            curves = {cfg.method: record}
            write_test_report(experiment.task, experiment.test_outputs, folder, cfg.method, curves)
    return record
