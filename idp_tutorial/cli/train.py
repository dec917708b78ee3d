"""The command `idp train`: train one method on one task, and save the prompt and the record.

`idp compare` trains many small runs. At full scale one run takes hours, on one GPU or several,
and is a job of its own. `idp train` trains one run, which continues after a kill; `idp predict`
uses the prompt that it saves. With several processes only the main process prints.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from idp_tutorial.cli.commands import TableOptions, TrainingRunOptions, command, print_report
from idp_tutorial.cli.progress import TrainingProgress
from idp_tutorial.utils.checks import Range, UserError, check_writable_folder
from idp_tutorial.utils.process import handle_messages, process_state


def _print_forecast(cfg: Any) -> None:
    """Print what `--dry_run` estimates: trained parameters, memory and time."""
    from idp_tutorial.data.tasks import load_config_task
    from idp_tutorial.runs.compare import estimate_training

    task = load_config_task(cfg)
    cfg = cfg.resolve_epochs(len(task.splits["train"]))
    estimate = estimate_training(cfg, task)
    counts = estimate["params"]
    groups = ", ".join(f"{n:,} {group}" for group, n in counts.items() if n)
    print(
        f"{cfg.method} on {cfg.task}: {sum(counts.values()):,} trained parameters "
        f"({groups or 'none'})"
    )
    print(
        f"memory about {estimate['memory_mb']:,.0f} MB; {cfg.steps} steps of "
        f"{cfg.batch_size * cfg.accumulate} examples, {estimate['ms_per_step']:,.0f} ms each, "
        f"about {estimate['seconds'] / 60:.1f} minutes, estimated from one step on this machine"
    )


def _refuse_table_in_output(options: "TrainOptions") -> None:
    """Refuse a table that a file of the run would replace."""
    from idp_tutorial.runs.experiment import REPORT_FOLDER

    if not options.table or not Path(options.table).is_file():
        return
    table = Path(options.table).resolve()
    out = Path(options.out).resolve()
    if table.parent in (out, out / REPORT_FOLDER):
        raise UserError(
            f"out={options.out} is the folder of the table {options.table}, which a file of the "
            "run may replace: give another folder."
        )


def _describe_run(cfg: Any) -> str:
    """Return the method, the backbone, and the rows and classes of the task."""
    from idp_tutorial.data.tasks import load_config_task

    task = load_config_task(cfg)
    rows = ", ".join(f"{len(rows):,} {split}" for split, rows in task.splits.items())
    kind = f", {len(task.labels)} classes" if task.labels else ""
    hint = ""
    if cfg.backbone == "tiny":
        hint = " (a small model of this package; --backbone minilm is a real one)"
    return f"{cfg.method} on backbone {cfg.backbone}{hint}: {rows} rows{kind}"


def _compare_with_controls(cfg: Any, record: dict[str, Any]) -> None:
    """Print the scores of words and of a probe, and warn if the method loses to them."""
    from idp_tutorial.runs.experiment import score_controls, warn_of_better_controls

    scores = score_controls(cfg)
    if scores:
        text = ", ".join(f"{name} {score:.1f}" for name, score in scores.items())
        print(f"without a prompt, in seconds: {text}")
    if warning := warn_of_better_controls(cfg.method, record["score"], scores):
        print(f"warning: {warning}", file=sys.stderr)


def _train_and_report(cfg: Any, learning_rates: tuple[float, ...], options: "TrainOptions") -> None:
    """Choose a learning rate if several are given, train, and print the score."""
    from idp_tutorial.runs.experiment import REPORT_FOLDER, train_and_save
    from idp_tutorial.runs.learning_rate_search import choose_learning_rate
    from idp_tutorial.training.callbacks import make_log_callbacks

    out = options.out
    check_writable_folder(out, "out=")
    _refuse_table_in_output(options)
    callbacks = make_log_callbacks(options.log_with)
    if not options.progress and not sys.stderr.isatty():
        callbacks.append(TrainingProgress(f"{cfg.method} on {cfg.task}"))
    search: dict = {}
    is_main_process = process_state().is_main_process
    if is_main_process:
        print(_describe_run(cfg), file=sys.stderr)
    messages = handle_messages() if is_main_process else nullcontext()
    try:
        if learning_rates:
            with messages:
                cfg, search = choose_learning_rate(cfg, learning_rates, out)
        record = train_and_save(
            cfg,
            out,
            save_every=options.save_every,
            report=options.report,
            callbacks=callbacks,
            progress=options.progress or None,
            **search,
        )
    except KeyboardInterrupt:
        print(
            f"stopped: the same command continues from the last checkpoint in {out}",
            file=sys.stderr,
        )
        raise
    if is_main_process:
        print(
            f"{cfg.method} on {cfg.task}, seed {cfg.seed}: {record['metric']} "
            f"{record['score']:.1f} (validation {record['validation']:.1f}), "
            f"{sum(record['params'].values()):,} trained parameters"
        )
        if options.controls and process_state().num_processes == 1:
            _compare_with_controls(cfg, record)
        print(f"written: {out}/record.jsonl, prompts.safetensors, prompts.json")
        if options.report:
            print_report(f"{out}/{REPORT_FOLDER}", sys.stdout)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TableOptions, TrainingRunOptions):
    """Options of `idp train`."""

    option_group: ClassVar[str] = "this command"

    method: str = "lpt-npg"  # a method of `METHODS`
    # steps between checkpoints (default: every evaluation; 0: none)
    save_every: Annotated[int, Range(0, 10**9)] | None = None
    # write loss, learning rate and validation score to tensorboard (out/runs) or to wandb
    log_with: Literal["tensorboard", "wandb"] | None = None
    # show a progress bar also where stderr is not a terminal, instead of a line every 30 seconds
    progress: bool = False
    out: str = "runs/train"  # folder of the run; a run that was stopped continues
    # print a report on the test split, and write it to OUT/report: scores of each class, confusion
    # matrix, calibration and misclassified rows; the rows are in it
    report: bool = False
    # score words and a probe on the same rows too, which takes seconds, and warn if one is better
    controls: bool = True
    # train nothing: print the trained parameters, and estimates of memory and time
    dry_run: bool = False


@command(TrainOptions, run_options=None, excluded=("eval_every",), task="questions")
def train_command(options: TrainOptions, base: Any) -> None:
    """Train one method on one task, or resume; on GPUs: accelerate launch --config_file configs/….

    idp train tickets.csv --text message --label topic --method lpt-npg --out tickets
    """
    from idp_tutorial.assembly.config import RunConfig, refuse_control, refuse_unread_options

    # an option that the method does not have is refused
    cfg = RunConfig(options.method, **base.to_dict())
    grid = options.learning_rate_grid(cfg.lr)
    refuse_control(cfg.method)
    refuse_unread_options(
        [cfg.method], cfg, learning_rates=options.learning_rates, save_every=options.save_every
    )
    if options.dry_run:
        _print_forecast(cfg)
    else:
        _train_and_report(cfg, grid, options)
