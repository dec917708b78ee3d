"""The command `idp_train`: train one method on one task, and save the prompt and the record.

`idp_compare` trains many small runs. At full scale one run takes hours, on one GPU or several,
and is a job of its own. `idp_train` trains one run, which continues after a kill; `idp_predict`
uses the prompt that it saves.

The command has nearly all fields of `RunConfig` as options; those that are only named have the
default and the comment of the field. With several processes only the main process prints.
"""

import sys
from typing import Any

from idp_tutorial.cli.command_line import Inherited, command, config_from_options
from idp_tutorial.cli.option_values import parse_learning_rates
from idp_tutorial.utils.checks import check_writable_folder

__all__ = ["idp_train"]


def _print_forecast(cfg: Any) -> None:
    """Print what `--dry_run` estimates: trained parameters, memory and time."""
    from idp_tutorial.data.tasks import load_task
    from idp_tutorial.reproduction.efficiency.training_estimate import estimate_training

    task = load_task(cfg.task, cfg.data, cfg.shots, cfg.split_seed, cfg.stratified)
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
        f"about {estimate['seconds'] / 60:.1f} minutes, estimated from one forward pass on this "
        "machine with the cost model"
    )


def _validate(cfg: Any, learning_rates: tuple[float, ...], save_every: int | None) -> None:
    """Check the options that neither a run nor its estimate accepts."""
    from idp_tutorial.assembly.options import refuse_control, refuse_unread_options

    refuse_control(cfg.method)
    refuse_unread_options([cfg.method], cfg, learning_rates=learning_rates, save_every=save_every)


def _train_and_report(
    cfg: Any, learning_rates: tuple[float, ...], out: str, save_every: int | None
) -> None:
    """Choose a learning rate if several are given, train, and print the score."""
    from accelerate import PartialState

    from idp_tutorial.runs.experiment import train_and_save
    from idp_tutorial.runs.tune import choose_learning_rate

    check_writable_folder(out, "--out ")
    search: dict = {}
    try:
        if learning_rates:
            cfg, search = choose_learning_rate(cfg, learning_rates, out, print)
        record = train_and_save(cfg, out, save_every=save_every, **search)
    except KeyboardInterrupt:
        print(
            f"stopped: the same command continues from the last checkpoint in {out}",
            file=sys.stderr,
        )
        raise
    if PartialState().is_main_process:
        print(
            f"{cfg.method} on {cfg.task}, seed {cfg.seed}: {record['metric']} "
            f"{record['score']:.1f} (validation {record['validation']:.1f}), "
            f"{sum(record['params'].values()):,} trained parameters"
        )
        print(f"written: {out}/record.jsonl, prompts.safetensors, prompts.json")


@command
def idp_train(
    *,
    table: Inherited,
    text: Inherited,
    text2: Inherited,
    label: Inherited,
    format: Inherited,
    regression: Inherited,
    validation: Inherited,
    test: Inherited,
    task: Inherited,
    method: str = "lpt-npg",  # a method of `METHODS`
    backbone: Inherited,
    data: Inherited,
    shots: Inherited,
    split_seed: int = 0,  # seed of the few-shot sample
    stratified: Inherited,
    seed: Inherited,
    steps: int = 300,  # optimizer steps
    batch_size: int = 32,  # examples in a batch of one process
    accumulate: Inherited,
    max_len: Inherited,
    prompt_length: Inherited,
    layer: Inherited,
    position: Inherited,
    bottleneck: Inherited,
    head: Inherited,
    pooling: Inherited,
    standardise: Inherited,
    glove: Inherited,
    sentence_pooling: Inherited,
    parameter_sharing: Inherited,
    generator_input: Inherited,
    insertion: Inherited,
    generator: Inherited,
    exclude_last_token: Inherited,
    attention_input: Inherited,
    prompt_relu: Inherited,
    init_std: Inherited,
    sentence_dropout: Inherited,
    generator_dropout: Inherited,
    glove_noise: Inherited,
    two_layer_head: Inherited,
    head_init: Inherited,
    schedule: Inherited,
    beta2: Inherited,
    eps: Inherited,
    no_decay_on_bias_and_norm: Inherited,
    learning_rates: Inherited,
    epochs: Inherited,
    lr: float | None = None,  # learning rate (default: the method's own)
    head_lr: Inherited,
    warmup: Inherited,
    weight_decay: Inherited,
    clip: Inherited,
    template: Inherited,
    loss_vocab: Inherited,
    prompt_dropout: Inherited,
    dropout_below_prompt: Inherited,
    evaluations: int = 10,  # evaluations on the validation split; the best one is kept
    save_every: int | None = None,  # steps between checkpoints (default: every evaluation; 0: none)
    cache: Inherited,
    precision: str = "no",  # 'bf16' or 'fp16': autocast in training
    compile: Inherited,
    dtype: Inherited,
    device: Inherited,
    patience: Inherited,
    class_weight: Inherited,
    out: str = "runs/train",  # folder of the run; a run that was stopped continues
    # train nothing: print the trained parameters, and estimates of memory and time
    dry_run: bool = False,
) -> None:
    """Train one method on one task, or resume; on GPUs: accelerate launch --config_file configs/….

    idp_train tickets.csv --text message --label topic --method lpt-npg --out tickets
    """
    cfg = config_from_options(locals())
    grid = parse_learning_rates(locals())
    _validate(cfg, grid, save_every)
    if dry_run:
        _print_forecast(cfg)
    else:
        _train_and_report(cfg, grid, out, save_every)
