"""The command `idp_transfer`: train on one task and predict another, with few or no examples.

Two tasks with the same labels need only their names. If the labels differ, `--labels` maps each
label of the first task to one of the second:
"""

from functools import partial
from pathlib import Path

from idp_tutorial.cli.command_line import Inherited, command, config_from_options, split_names
from idp_tutorial.cli.option_values import parse_learning_rates
from idp_tutorial.utils.checks import UserError, check_between, check_writable_folder

__all__ = ["parse_label_map", "idp_transfer"]


def parse_label_map(
    text: str | None,  # LABEL=LABEL,LABEL=LABEL; None: the tasks define the map
) -> dict[str, str] | None:  # label of the first task: label of the second
    """Return the label map in the value of `--labels`."""
    if not text:
        return None
    label_map: dict[str, str] = {}
    for pair in text.split(","):
        labels = [label.strip() for label in pair.split("=")]
        if len(labels) != 2:
            raise UserError(
                f"--labels {text}: {pair.strip()!r} is not a pair: write LABEL=LABEL,LABEL=LABEL."
            )
        source, target = labels
        if source in label_map:
            raise UserError(f"--labels {text}: label {source!r} is mapped twice: keep one pair.")
        label_map[source] = target
    return label_map


@command
def idp_transfer(
    *,
    source: str = "sentiment",  # task to train on: of `TASKS`, bundled or in the folder --data
    target: str = "two-domains",  # task to predict
    # comma-separated; ID-SPAM's LPT has a generator
    methods: str = "fine-tuning,prompt-tuning,smop,lpt-npg,id-spam",
    backbone: Inherited,
    data: Inherited,
    shots: int | None = None,  # training examples of the source (default: all)
    target_shots: int = 100,  # training examples of the target; 0: zero-shot only
    # label map, if the tasks do not define it: entailment=entailment,neutral=not_entailment,…
    labels: str | None = None,
    seeds: Inherited,
    steps: int = 300,  # optimizer steps of each stage
    batch_size: Inherited,
    max_len: Inherited,
    prompt_length: Inherited,
    layer: Inherited,
    # width of a generator's bottleneck (ID-SPAM's LPT: 256; default: the method's own)
    bottleneck: int | None = None,
    head: Inherited,
    lr: Inherited,
    # learning rates that every method tries in each stage, such as 1e-3,3e-3
    learning_rates: str | None = None,
    tune: Inherited,
    # choose the head's learning rate from three on the first task, and use it for every method
    tune_head_first: bool = False,
    evaluations: int = 10,  # evaluations on the validation split in a stage; the best one is kept
    test_rows: int | None = None,  # number of test examples that are scored (default: all)
    precision: Inherited,
    device: Inherited,
    # folder for transfer-SOURCE-TARGET-BACKBONE.jsonl; runs that the file contains are not repeated
    out: str = "runs",
) -> None:
    """Train methods on one task, predict another, and continue training with a few examples."""
    check_writable_folder(out, "--out ")
    check_between(test_rows, 1, 10**9, "test_rows", "examples of each test split")
    check_between(target_shots, 0, 10**9, "target_shots", "training examples of the second task")
    grid = parse_learning_rates(locals())
    base = config_from_options(locals(), task=source)
    from idp_tutorial.assembly.options import refuse_unread_options
    from idp_tutorial.methods.registry import METHODS
    from idp_tutorial.reproduction.papers.transfer_comparison import (
        compare_transfer,
        transfer_table,
    )

    selected = split_names(methods)
    refuse_unread_options(
        selected,
        base,
        allowed_methods=METHODS,
        tune=tune,
        tune_head_first=tune_head_first,
        learning_rates=learning_rates,
    )
    label_map = parse_label_map(labels)
    few_shot = f"-k{shots}" if shots else ""
    verbalizer = "-verbalizer" if head == "verbalizer" else ""
    name = f"transfer-{source}{few_shot}-{target}{verbalizer}-{Path(backbone).name}.jsonl"
    file = Path(out) / name
    records = compare_transfer(
        selected,
        base,
        target,
        target_shots,
        seeds,
        tune or bool(grid),
        label_map,
        file,
        test_rows=test_rows,
        report=partial(print, flush=True),
        tune_head_first=tune_head_first,
        learning_rates=grid,
    )
    print(f"\n{transfer_table(records).to_string()}\n\nwritten: {file}")
