"""Train on one task and predict another, with few or no examples of the second.

    python -m results.transfer.run --source sentiment --target two-domains --target_shots 100

Two tasks with the same labels need only their names. If the labels differ, `--labels` maps each
label of the first task to one of the second: `--labels yes=positive,no=negative`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from idp_tutorial.cli.commands import ComparisonOptions, command, split_names
from idp_tutorial.utils.checks import Range, UserError, check_writable_folder
from idp_tutorial.utils.process import handle_messages


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
                f"labels={text}: {pair.strip()!r} is not a pair: write LABEL=LABEL,LABEL=LABEL."
            )
        source, target = labels
        if source in label_map:
            raise UserError(f"labels={text}: label {source!r} is mapped twice: keep one pair.")
        label_map[source] = target
    return label_map


@dataclass(frozen=True, kw_only=True)
class TransferOptions(ComparisonOptions):
    """Options of this script."""

    option_group: ClassVar[str] = "this command"

    source: str = "sentiment"  # task to train on: of `TASKS`, bundled or in the folder data
    target: str = "two-domains"  # task to predict
    # comma-separated; ID-SPAM's LPT has a generator
    methods: str = "fine-tuning,prompt-tuning,smop,lpt-npg,id-spam"
    # training examples of the target; 0: zero-shot only
    target_shots: Annotated[int, Range(0, 10**9)] = 100
    # label map, if the tasks do not define it: entailment=entailment,neutral=not_entailment,…
    labels: str | None = None
    # number of test examples that are scored (default: all)
    test_rows: Annotated[int, Range(1, 10**9)] | None = None
    # folder for transfer-SOURCE-TARGET-BACKBONE.jsonl; runs that the file contains are not repeated
    out: str = "runs"


# no `metric`: scores are the mean of accuracy and macro-F1, as in ID-SPAM's tables
@command(TransferOptions, run_options=None, excluded=("task", "seed", "eval_every", "metric"))
def transfer_command(options: TransferOptions, base: Any) -> None:
    """Train methods on one task, predict another, and continue training with a few examples.

    python -m results.transfer.run --source sentiment --target two-domains --target_shots 100
    """
    check_writable_folder(options.out)
    grid = options.learning_rate_grid(base.lr)
    base = base.with_options(task=options.source)
    from results.transfer.scores import compare_transfer, transfer_table

    methods = split_names(options.methods)
    options.refuse_unread(methods, base)
    few_shot = f"-k{base.shots}" if base.shots else ""
    verbalizer = "-verbalizer" if base.head == "verbalizer" else ""
    tasks = f"{options.source}{few_shot}-{options.target}{verbalizer}"
    file = Path(options.out) / f"transfer-{tasks}-{Path(base.backbone).name}.jsonl"
    with handle_messages():
        records = compare_transfer(
            methods,
            base,
            options.target,
            options.target_shots,
            options.seeds,
            options.tune or bool(grid),
            parse_label_map(options.labels),
            file,
            test_rows=options.test_rows,
            tune_head_first=options.tune_head_first,
            learning_rates=grid,
        )
    print(f"\n{transfer_table(records).to_string()}\n\nwritten: {file}")


if __name__ == "__main__":
    transfer_command.main(sys.argv[1:])
