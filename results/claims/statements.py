"""Statements of the papers that their own tables decide, and differences that the tables print.

A statement such as "M-IDPG-PHM is better than Compacter on four tasks" needs no run: it is
counted, or read from the printed table. `STATEMENT_CHECKS` has a function for each of them, which
computes the value again from the published scores or the parameter counts, so that no result is
typed in. A statement about a difference that a run can measure names its cells instead, as in

    idpg-3: M-IDPG-PHM − prompt tuning; setting=K=100

and `printed_differences` returns the difference for each task of that table.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from idp_tutorial.reproduction.efficiency.published_counts import published_counts
from idp_tutorial.reproduction.papers.published_scores import TASK_NAMES, load_published_scores
from idp_tutorial.utils.checks import UserError

AVERAGE = "Avg"  # the published name of the mean of all tasks
MINUS = " − "  # between the two methods of a printed difference


class StatementCheck(NamedTuple):
    """The value that the paper's own numbers give, and whether its statement agrees."""

    recomputed: str
    agrees: bool


def task_key(
    published_task: str,  # name of a task, or of a pair such as 'SST-2->IMDB'
) -> str:  # as in the tasks of a claim: 'sst2', or 'sst2→imdb'
    """Return the name of a published task in this library."""
    names = published_task.split("->")
    return "→".join(TASK_NAMES.get(name, name.lower()) for name in names)


def published_means(
    table: str,  # such as 'lpt-4'
    setting: str = "",  # a part of the setting
    backbone: str = "",  # a part of the name of the backbone
    metric: str = "",  # a part of the name of the metric
) -> pd.DataFrame:  # tasks × methods
    """Return the printed means of a table."""
    cells = load_published_scores(table)
    for column, part in (("setting", setting), ("backbone", backbone), ("metric", metric)):
        pattern = re.escape(part) + r"(?!\d)"  # K=100 is no part of K=1000
        cells = cells[cells[column].fillna("").str.contains(pattern)]
    return cells.pivot_table(index="task", columns="method", values="mean", sort=False)


def printed_differences(
    cells: str,  # 'TABLE: A − B', then conditions such as '; setting=K=100; task=SST-2,TREC'
) -> dict[str, float]:  # task, or 'Avg' for the printed mean: difference
    """Return the printed difference between two methods, for each task of a table.

    Raises: `UserError` for a description that cannot be read.
    """
    first, *words = [part.strip() for part in cells.split(";")]
    table, _, methods = first.partition(": ")
    a, _, b = methods.partition(MINUS)
    conditions = dict(word.split("=", 1) for word in words if "=" in word)
    tasks = conditions.pop("task", "")
    try:
        means = published_means(table, **conditions)
        differences = (means[a] - means[b]).dropna().round(2).to_dict()
    except (KeyError, TypeError) as e:
        raise UserError(
            f"the printed difference {cells!r} cannot be read ({e}): write TABLE: A − B, with "
            "methods of that table, and setting=, backbone=, metric= or task= after semicolons."
        ) from e
    if tasks:
        differences = {task: differences[task] for task in tasks.split(",")}
    return {
        task if task == AVERAGE else task_key(task): value for task, value in differences.items()
    }


def _count(method: str, backbone: str = "RoBERTa-large", paper: str = "IDPG") -> int:
    """Return the exact number of parameters of a published count."""
    rows = published_counts(build_modules=False)
    return next(
        r["exact"]
        for r in rows
        if (r["paper"], r["backbone"], r["method"]) == (paper, backbone, method)
    )


def _format_names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _compare_with_others(
    table: str,
    method: str,
    others: tuple[str, ...] = (),  # (): all other soft prompts of the table
    **selection: str,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Return the tasks on which a method is above all others, its ties, and its rank by task."""
    means = published_means(table, **selection).drop(index=AVERAGE, errors="ignore")
    if others:
        rivals = means[list(others)]
    else:
        rivals = means.drop(columns=[method, "Fine-tuning", "LoRA"], errors="ignore")
    best_rival = rivals.max(axis=1)
    wins = means.index[means[method] > best_rival].tolist()
    ties = means.index[means[method] == best_rival].tolist()
    ranks = (rivals.gt(means[method], axis=0).sum(axis=1) + 1).to_dict()
    return wins, ties, ranks


def _check_wins(
    table: str, n_claimed: int, others: tuple[str, ...] = (), **selection: str
) -> StatementCheck:
    """Check on how many tasks ID-SPAM is above the others; a tie is not a win."""
    wins, ties, ranks = _compare_with_others(table, "ID-SPAM", others, **selection)
    tied = f"; equal on {_format_names(ties)}" if ties else ""
    text = f"{len(wins)} of {len(ranks)}: {_format_names(wins)}{tied}"
    return StatementCheck(text, len(wins) == n_claimed)


def _check_difference(cells: str, claimed: float) -> StatementCheck:
    """Check a difference of two printed averages."""
    value = printed_differences(cells)[AVERAGE]
    return StatementCheck(f"{value:+.1f}", abs(value - claimed) < 0.05)


def _check_few_shot_gains(setting: str, over_prompt: float) -> StatementCheck:
    """Check the gain of M-IDPG-PHM over prompt tuning and over P-tuning v2 (IDPG, Table 3)."""
    checks = [
        _check_difference(f"idpg-3: M-IDPG-PHM − {b}; setting={setting}", claimed)
        for b, claimed in (("prompt tuning", over_prompt), ("P-Tuningv2", 0.2))
    ]
    text = " and ".join(check.recomputed for check in checks)
    return StatementCheck(text, all(check.agrees for check in checks))


def _four_three() -> StatementCheck:
    wins, ties, _ = _compare_with_others("idpg-1", "M-IDPG-PHM", ("Compacter",))
    text = f"above on {_format_names(wins)}; equal on {_format_names(ties)}"
    return StatementCheck(text, (len(wins), len(ties)) == (4, 3))


def _gap_from_two_tasks() -> StatementCheck:
    gaps = printed_differences("idpg-1: Compacter − M-IDPG-PHM")
    del gaps[AVERAGE]
    two = gaps["rte"] + gaps["qqp"]
    rest = sum(gaps.values()) - two
    text = f"Compacter is {two:.1f} ahead on RTE and QQP together, and {rest:+.1f} on the others"
    return StatementCheck(text, two > abs(rest))


def _best_on_single_sentences() -> StatementCheck:
    means = published_means("idpg-1").loc[["MPQA", "Subj", "CR", "MR"]]
    is_idpg = means.columns.str.contains("IDPG")
    lead = means.loc[:, is_idpg].max(axis=1) - means.loc[:, ~is_idpg].max(axis=1)
    text = f"above all others on {_format_names(lead.index[lead > 0].tolist())}"
    text += f"; equal to the best other on {_format_names(lead.index[lead == 0].tolist())}"
    return StatementCheck(text, bool((lead > 0).all()))


def _single_sentence_gains() -> StatementCheck:
    means = published_means("idpg-1").loc[["MPQA", "Subj", "CR", "MR", "SST-2"]].mean()
    gains = [round(means["M-IDPG-PHM"] - means[other], 2) for other in ("RoBERTa", "EFL")]
    return StatementCheck(f"{gains[0]:+.2f} and {gains[1]:+.2f}", gains == [0.84, 0.36])


def _vote_with_layer_norm() -> StatementCheck:
    votes = published_means("idpg-7", metric="voting").loc[AVERAGE]
    norm = votes["+LayerNorm"] - votes["PHM"]
    residual = votes["+residual"] - votes["PHM"]
    text = f"LayerNorm {norm:+.1f}, residual {residual:+.1f}"
    return StatementCheck(text, bool(norm > 0 > residual))


def _parameters_saved_by_idpg() -> StatementCheck:
    saved = _count("Compacter") - _count("M-IDPG-PHM")
    return StatementCheck(
        f"{saved:,} parameters, {saved / 1024:.1f} × 1,024", round(saved / 1024) == 15
    )


def _parameters_of_dnn() -> StatementCheck:
    added = _count("M-IDPG-DNN") - _count("M-IDPG-PHM")
    return StatementCheck(
        f"{added:,} parameters = {added / 1024:.0f} × 1,024", round(added / 1024) == 87
    )


def _fewer_than_prompt_tuning() -> StatementCheck:
    counts = [_count(method) for method in ("M-IDPG-PHM", "S-IDPG-PHM", "Prompt-tuning")]
    text = f"{counts[0]:,} (M) or {counts[1]:,} (S), and prompt tuning {counts[2]:,}"
    return StatementCheck(text, max(counts[:2]) < counts[2])


def _third_of_adapterdrop() -> StatementCheck:
    ratio = _count("LPT w/ MPPG", paper="LPT") / _count("AdapterDrop", paper="LPT")
    return StatementCheck(f"{ratio:.3f}", abs(ratio - 1 / 3) < 0.02)


def _memory_saved(method: str, claimed: float) -> StatementCheck:
    memory = published_means("lpt-5", backbone="RoBERTa", metric="memory").loc["RTE"]
    saved = 100 * (1 - memory[method] / memory["Model Tuning"])
    text = f"1 − {memory[method]:g} / {memory['Model Tuning']:g} = {saved:.1f} % (Table 5, in GB)"
    return StatementCheck(text, bool(abs(saved - claimed) < 0.05))


def _parameters_of_prompt_tuning() -> StatementCheck:
    ratio = _count("Model Tuning", paper="LPT") / _count("Prompt Tuning", paper="LPT")
    return StatementCheck(f"{ratio:,.0f}", round(ratio, -3) == 17000)


def _generators_above_baselines(setting: str, generators: tuple[str, ...]) -> StatementCheck:
    """Check that generated late prompts have better averages than all baselines of LPT."""
    averages = published_means(setting).loc[AVERAGE]
    baselines = averages[~averages.index.str.startswith("LPT")]
    lowest = averages[list(generators)].min()
    text = ", ".join(f"{averages[name]:.1f}" for name in generators)
    text += f"; best baseline {baselines.max():.1f} ({baselines.idxmax()})"
    return StatementCheck(text, bool(lowest > baselines.max()))


def _above_adapterdrop() -> StatementCheck:
    gains = []
    for backbone in ("RoBERTa", "GPT2"):
        accuracy = published_means("lpt-5", backbone=backbone, metric="accuracy").loc["RTE"]
        gains.append(round(accuracy["LPT w/ NPG"] - accuracy["AdapterDrop"], 1))
    return StatementCheck(f"{gains[0]:+.1f} and {gains[1]:+.1f}", gains == [20.1, 7.0])


def _layer_19() -> StatementCheck:
    accuracy, speed = (
        published_means("lpt-10", metric=metric).loc["RTE"] for metric in ("accuracy", "speed")
    )
    cells = []
    is_cheaper_and_worse = []
    for generator in ("NPG", "MPPG", "APPG"):
        name = f"LPT w/ {generator} at layer "
        loss = accuracy[name + "19"] - accuracy[name + "13"]
        ratio = speed[name + "19"] / speed[name + "13"]
        cells.append(f"{generator} {loss:+.1f} points, {ratio:.2f} times the speed")
        is_cheaper_and_worse.append(loss < 0 and ratio > 1)
    return StatementCheck("; ".join(cells), all(is_cheaper_and_worse))


def _second_on_two_tasks() -> StatementCheck:
    ranks = _compare_with_others("id-spam-2", "ID-SPAM", backbone="RoBERTa-large")[2]
    others = {task: rank for task, rank in ranks.items() if rank > 1}
    text = "RoBERTa-large: " + ", ".join(f"rank {rank} on {task}" for task, rank in others.items())
    return StatementCheck(text, set(others.values()) == {2})


def _best_average(*tables: str) -> StatementCheck:
    """Check that ID-SPAM has the best average of tables of SuperGLUE."""
    leads = []
    for table in tables:
        averages = published_means(table).loc[AVERAGE]
        leads.append(averages["ID-SPAM"] - averages.drop("ID-SPAM").max())
    text = ", ".join(f"{lead:+.1f} above the next" for lead in leads)
    return StatementCheck(text, bool(min(leads) > 0))


def _two_of_four_on_gpt2() -> StatementCheck:
    wins, _, ranks = _compare_with_others("id-spam-9", "ID-SPAM")
    text = ", ".join(f"rank {rank} on {task}" for task, rank in ranks.items())
    return StatementCheck(text, len(wins) == 2 and list(ranks.values()).count(2) == 1)


def _relative_gains_on_gpt2_large() -> StatementCheck:
    averages = published_means("id-spam-10").loc[AVERAGE]
    gains = [100 * (averages["ID-SPAM"] / averages[b] - 1) for b in ("LoRA", "LPT")]
    text = f"{gains[0]:.1f} % and {gains[1]:.1f} % of the averages"
    return StatementCheck(text, [round(gain, 1) for gain in gains] == [0.5, 1.3])


def _mean_time_to_convergence() -> StatementCheck:
    times = published_means("id-spam-15").mean()
    saved = 100 * (1 - times["ID-SPAM"] / times["LPT"])
    text = f"({times['LPT']:.1f} − {times['ID-SPAM']:.1f}) / {times['LPT']:.1f} = {saved:.1f} %"
    return StatementCheck(text, bool(abs(saved - 7.3) < 0.05))


def _less_time_than_lora() -> StatementCheck:
    ratios = []
    for metric in ("training", "inference"):
        times = published_means("id-spam-14", metric=metric)
        ratios += (times["ID-SPAM"] / times["LoRA"]).tolist()
    text = "ID-SPAM / LoRA: " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return StatementCheck(text, max(ratios) < 1)


def _lora_loss_after_30_epochs() -> StatementCheck:
    cells = load_published_scores("id-spam-16")
    changes = []
    for task in ("MRPC", "RTE"):
        losses = cells[cells.task == task].set_index("metric")["mean"]
        first, before, last = (losses[f"training loss at epoch {n}"] for n in (5, 25, 30))
        changes.append((before - last) / first)
    text = "the last five epochs change it by "
    text += " and ".join(f"{100 * change:.0f} %" for change in changes)
    return StatementCheck(text + " of its value at epoch 5", bool(max(changes) < 0.1))


def _comparable_with_lpt() -> StatementCheck:
    base, large = (
        _count("ID-SPAM", backbone, "ID-SPAM") / _count("LPT", backbone, "ID-SPAM")
        for backbone in ("RoBERTa-base", "RoBERTa-large")
    )
    text = f"ID-SPAM / LPT: {base:.2f} on RoBERTa-base, {large:.2f} on RoBERTa-large"
    return StatementCheck(text, base < 1 and abs(large - 1) < 0.1)


# id of a claim: its check
STATEMENT_CHECKS: dict[str, Callable[[], StatementCheck]] = {
    "idpg-four-three": _four_three,
    "idpg-15k": _parameters_saved_by_idpg,
    "idpg-rte-qqp": _gap_from_two_tasks,
    "idpg-four-best": _best_on_single_sentences,
    "idpg-over-efl": _single_sentence_gains,
    "idpg-87k": _parameters_of_dnn,
    "idpg-k500": lambda: _check_few_shot_gains("K=500", 1.9),
    "idpg-k1000-printed": lambda: _check_few_shot_gains("K=1000", 2.0),
    "idpg-layernorm-vote": _vote_with_layer_norm,
    "idpg-fewer": _fewer_than_prompt_tuning,
    "lpt-256": lambda: _check_difference("lpt-1: Prompt Tuning-256 − Prompt Tuning", 1.8),
    "lpt-ppg-100": lambda: _generators_above_baselines("lpt-2", ("LPT w/ MPPG", "LPT w/ APPG")),
    "lpt-npg-500": lambda: _generators_above_baselines("lpt-3", ("LPT w/ NPG",)),
    "lpt-third": _third_of_adapterdrop,
    "lpt-adapterdrop-rte": _above_adapterdrop,
    "lpt-layer-19": _layer_19,
    "lpt-memory": lambda: _memory_saved("LPT w/ NPG", 56.6),
    "lpt-298": lambda: _memory_saved("Prompt Tuning", 29.8),
    "lpt-17000": _parameters_of_prompt_tuning,
    "spam-4of6": lambda: _check_wins("id-spam-2", 4, backbone="RoBERTa-base"),
    "spam-second": _second_on_two_tasks,
    "spam-lora-5of6": lambda: _check_wins("id-spam-2", 5, ("LoRA",), backbone="RoBERTa-base"),
    "spam-lora-3of6": lambda: _check_wins("id-spam-2", 3, ("LoRA",), backbone="RoBERTa-large"),
    "spam-superglue": lambda: _check_wins("id-spam-4", 2),
    "spam-superglue-large": lambda: _check_wins("id-spam-5", 3),
    "spam-superglue-average": lambda: _best_average("id-spam-4", "id-spam-5", "id-spam-9"),
    "spam-superglue-gpt2": _two_of_four_on_gpt2,
    "spam-gpt2-large": _relative_gains_on_gpt2_large,
    "spam-zero-ft": lambda: _check_wins("id-spam-6", 3, ("Fine-tuning",)),
    "spam-converge": _mean_time_to_convergence,
    "spam-time-lora": _less_time_than_lora,
    "spam-lora-converged": _lora_loss_after_30_epochs,
    "spam-comparable": _comparable_with_lpt,
}


def check_statement(
    claim_id: str,  # key of `STATEMENT_CHECKS`
) -> StatementCheck:
    """Compute a statement again from the paper's own numbers."""
    if claim_id not in STATEMENT_CHECKS:
        raise UserError(
            f"claim {claim_id!r} names no two sides of a contrast, so it needs a function in "
            "STATEMENT_CHECKS that computes it from the paper's tables. Add one, or give a and b."
        )
    return STATEMENT_CHECKS[claim_id]()
