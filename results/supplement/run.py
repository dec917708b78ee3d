"""Run the first stage of IDPG's supplementary training.

    python -m results.supplement.run --method s-idpg-phm --task mnli --data FOLDER --out runs/mnli

Backbone, prompts and head are trained on an intermediate task (IDPG §A.4: MNLI, every pair in
both orders), and saved in one folder. The second stage is a run of `idp train` that starts from
this folder: its backbone stays frozen, and its prompts are the initial ones.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idp_tutorial.cli.commands import CommandOptions, command
from idp_tutorial.utils.checks import check_writable_folder


@dataclass(frozen=True, kw_only=True)
class SupplementOptions(CommandOptions):
    """Options of this script."""

    method: str = "s-idpg-phm"  # a method of `METHODS` that adds no weights to the backbone
    # train on every pair in one order only; a task of single sentences has one order
    one_order: bool = False
    # folder for the trained backbone, prompts and head; a finished run is not repeated
    out: str = "runs/supplement"


@command(
    SupplementOptions,
    run_options=None,
    # one training run without cached states, which starts from no earlier one
    excluded=("steps", "eval_every", "accumulate", "init_from", "cache", "cache_dtype"),
    task="mnli",
    backbone="roberta-large",
    lr=1e-5,
    epochs=10.0,
    batch_size=32,
    warmup=0.0,
    weight_decay=0.1,
    beta2=0.98,
    eps=1e-6,
    clip=float("inf"),
    pooling="cls",
)
def supplement_command(options: SupplementOptions, base: Any) -> None:
    """Train backbone and prompts on an intermediate task, as IDPG does before its second stage.

    python -m results.supplement.run --method s-idpg-phm --task mnli --data FOLDER --out runs/mnli
    """
    check_writable_folder(str(Path(options.out).parent), "out=")
    from idp_tutorial.assembly.build import build_model
    from idp_tutorial.assembly.config import RunConfig, refuse_control
    from idp_tutorial.data.tasks import load_config_task
    from idp_tutorial.reproduction.papers.protocols import own_prompt_lengths
    from results.supplement.supplementary_training import run_supplementary_training

    refuse_control(options.method)
    length = own_prompt_lengths().get(options.method)
    defaults = {"prompt_length": length} if length else {}
    # an option that the method does not have is refused
    cfg = RunConfig(options.method, **{**defaults, **base.to_dict()})
    task = load_config_task(cfg)
    stage = run_supplementary_training(
        cfg,
        build_model,
        task,
        options.out,
        with_swapped_pairs=task.pair and not options.one_order,
    )
    length = cfg.get("prompt_length")
    length_option = f" --prompt_length {length}" if length else ""
    print(
        f"{cfg.method} on {cfg.task}: validation {stage['validation']:.1f} after "
        f"{stage['steps']} steps"
    )
    print(
        f"written: {options.out}; second stage: idp train --method {cfg.method} "
        f"--backbone {options.out} --init_from {options.out}{length_option} --task TASK"
    )


if __name__ == "__main__":
    supplement_command.main(sys.argv[1:])
