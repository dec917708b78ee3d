"""Does a difference between two methods depend on a setting? The interaction answers.

A gain that a paper reports may belong to the method or to the setting in which it was measured,
such as a head that begins at random. The contrast of two methods is measured in both settings; the
*interaction* is the difference between the two contrasts, paired by seed and by test example. Its
interval says whether the settings differ, which two separate intervals do not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from idp_tutorial.runs.contrasts import paired_bootstrap, per_example_accuracy
from idp_tutorial.runs.logits import has_logits
from idp_tutorial.utils.checks import UserError

__all__ = ["collect_accuracies", "estimate_contrast_in_setting", "estimate_interaction"]


def _stack_by_seed(runs: dict[int, np.ndarray]) -> np.ndarray:
    return np.stack([runs[seed] for seed in sorted(runs)])


def collect_accuracies(
    records: Sequence[Mapping[str, Any]],  # of several tasks, methods, settings and seeds
    method: str,
    setting: Mapping[str, Any],  # options and their values, such as `head_init='random'`
    folder: Path | str,  # folder of the records
) -> dict[str, np.ndarray]:  # task: accuracies in percent `[S,N]` of S seeds and N examples
    """Return the accuracy on each test example of a method's runs in one setting.

    Runs without logits only served to choose a learning rate, and are left out. Raises: `UserError`
    for two runs of one seed.
    """
    by_task: dict[str, dict[int, np.ndarray]] = {}
    for record in records:
        is_wanted = record["method"] == method and has_logits(dict(record), folder)
        if not is_wanted or any(record.get(name) != value for name, value in setting.items()):
            continue
        runs = by_task.setdefault(record["task"], {})
        if record["seed"] in runs:
            raise UserError(
                f"{method} on {record['task']} has two runs with seed {record['seed']} in the "
                f"setting {dict(setting)}: name more options, or keep one learning rate."
            )
        runs[record["seed"]] = per_example_accuracy(dict(record), folder)
    return {task: _stack_by_seed(runs) for task, runs in by_task.items()}


def _differences(
    records: Sequence[Mapping[str, Any]],
    a: str,
    b: str,
    setting: Mapping[str, Any],
    folder: Path | str,
) -> dict[str, np.ndarray]:
    """Return `a - b` for each seed and example of every task that both methods have."""
    of_a = collect_accuracies(records, a, setting, folder)
    of_b = collect_accuracies(records, b, setting, folder)
    tasks = [task for task in of_a if task in of_b]
    for task in tasks:
        if of_a[task].shape != of_b[task].shape:
            raise UserError(
                f"{a} and {b} have {len(of_a[task])} and {len(of_b[task])} runs on {task} in the "
                f"setting {dict(setting)}: run the missing seeds."
            )
    return {task: of_a[task] - of_b[task] for task in tasks}


def estimate_contrast_in_setting(
    records: Sequence[Mapping[str, Any]],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    setting: Mapping[str, Any],  # options and their values
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate `a - b` in one setting, over all tasks, seeds and examples."""
    differences = _differences(records, a, b, setting, folder)
    if not differences:
        return None
    values = [*differences.values()]
    estimate = paired_bootstrap(values, [np.zeros_like(d) for d in values])
    return dict(estimate, tasks=[*differences])


def estimate_interaction(
    records: Sequence[Mapping[str, Any]],
    a: str,  # name of a method
    b: str,  # the method that is subtracted
    first: Mapping[str, Any],  # options of one setting
    second: Mapping[str, Any],  # options of the setting that is subtracted
    folder: Path | str,  # folder of the records
) -> dict[str, Any] | None:  # of `paired_bootstrap`, and `tasks`; None without common tasks
    """Estimate by how much `a - b` is larger in the first setting than in the second."""
    in_first = _differences(records, a, b, first, folder)
    in_second = _differences(records, a, b, second, folder)
    tasks = [task for task in in_first if task in in_second]
    if not tasks:
        return None
    estimate = paired_bootstrap([in_first[t] for t in tasks], [in_second[t] for t in tasks])
    return dict(estimate, tasks=tasks)
