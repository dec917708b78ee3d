"""A table of the papers' claims, with the verdict that the project's records give on each.

A claim is a row of `results/claims.csv`, and has one of three kinds. A claim that is *counted* or
*read from the paper's own tables* is computed from the published numbers (`statements`), and
agrees with them or differs. A claim that is *measured here* names the records and the two sides
of a contrast. It has a verdict only if the records are of a task of the paper, with the head that
the paper uses; a result on another task is a *finding* of this project, whose words name the task
and the backbone. Two claims that compare the same two sides of the same records are one contrast,
and `count_contrasts` counts it once.

    python -m results.claims.verdicts

reads the records, writes `results/claims.csv` again, and prints which verdicts changed.
"""

import argparse
import csv
import io
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from idp_tutorial.cli.commands import exit_with_message
from idp_tutorial.reproduction.papers.protocols import (
    paper_head,
    paper_method_fields,
    select_paper_learning_rates,
)
from idp_tutorial.reproduction.papers.published_scores import TASK_NAMES, load_published_scores
from idp_tutorial.runs.statistics import (
    PAIRED_INTERVAL,
    SETTING_FIELDS,
    adjust_p_values_holm,
    estimate_contrast,
    mean_of_side,
    select_side,
)
from idp_tutorial.utils.checks import UserError, check_choice
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.records import parse_conditions, read_records, select_records
from results.claims.decision import (
    EQUIVALENCE_MARGIN,
    VERDICT_MEANINGS,
    decide_verdict,
    has_enough_runs,
)
from results.claims.statements import (
    AVERAGE,
    check_statement,
    printed_differences,
    task_key,
)

MEASURED = "measured here"
CLAIM_KINDS = {
    MEASURED: "a contrast of records of this project",
    "counted": "trained parameters of built modules",
    "read from the paper's own tables": "arithmetic on printed numbers",
}
WITHIN = f"within ±{EQUIVALENCE_MARGIN:g}"
ON_A_CPU = "seen on a CPU"
OUT_OF_REACH = "cannot be decided here"
CLAIM_VERDICTS = {
    **{verdict: VERDICT_MEANINGS[verdict] for verdict in ("seen", "opposite", "not seen")},
    WITHIN: "not significant, and the whole interval is within a point of 0",
    ON_A_CPU: "a ratio of times, measured on a CPU",
    "open": VERDICT_MEANINGS["open"],
    "not run": "there are no records",
    OUT_OF_REACH: "it needs a task, a backbone or a precision that this project does not have",
    "agrees": "the paper's own numbers give what it states",
    "differs": "the paper's own numbers give something else",
}
COMPUTED_COLUMNS = (
    *("tasks", "backbones", "runs", "texts", "interval_over"),  # the records
    *("effect", "low", "high", "p", "detectable", "above"),  # the contrast, and a control
    *("published", "recomputed"),  # values of the paper
    *("steps", "rise"),  # of the training, and what the last fifth of it still gained
    *("trials", "verdict", "reason", "scope", "finding"),
)
CLAIM_COLUMNS = (
    *("id", "paper", "where", "sentence", "contrast"),  # the source, and what it compares
    *("kind", "says", "stated", "printed"),  # what the paper claims
    *("family", "a", "b", "keep", "records"),  # two sides of a contrast, and their records
    *COMPUTED_COLUMNS,
    "beyond",  # why it cannot be decided here
    "decides",
)
SPEED_RATIOS: dict[str, tuple[str, dict[str, Any]]] = {  # claim: file of times, and its record
    "lpt-faster": (
        "speed/bench-roberta-large.jsonl",
        dict(method="lpt-npg", layer=12, cached=False),
    ),
}


def _first_empty_column(row: dict[str, str]) -> str | None:
    """Return the name of a column that must have a value in this row and has none."""
    required = ["id", "paper", "where", "sentence", "contrast", "kind"]
    if row["a"]:
        required += ["b", "family", "records"]
    if row["verdict"] in ("open", "not run"):
        required.append("decides")
    return next((column for column in required if not row[column]), None)


def read_claims(
    file: Path | str,  # CSV file with the columns `CLAIM_COLUMNS`
) -> list[dict[str, str]]:  # column → value, numbers as text
    """Read the claims of a file, and raise `UserError` for a row that is not complete."""
    with open(file, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    if not rows or any(tuple(row) != CLAIM_COLUMNS or None in row.values() for row in rows):
        raise UserError(
            f"{file} holds no claims. Give a CSV file such as results/claims.csv, with a row per "
            f"claim and the columns {', '.join(CLAIM_COLUMNS)}."
        )
    ids = [row["id"] for row in rows]
    for row in rows:
        name = f"claim {row['id']!r}"
        check_choice(row["verdict"], CLAIM_VERDICTS, f"verdict of {name}")
        check_choice(row["kind"], CLAIM_KINDS, f"kind of {name}")
        check_choice(row["says"], ("", ">", "<", "="), f"sign (`says`) of {name}")
        if ids.count(row["id"]) > 1:
            raise UserError(f"{file}: the id of {name} is used twice. Give the claim another id.")
        if empty := _first_empty_column(row):
            raise UserError(
                f"{file}: {name} has no {empty}. Every claim needs its source, and an open claim "
                "needs `decides`: what would decide it."
            )
    return rows


def write_claims(rows: list[dict[str, str]], file: Path | str) -> None:
    """Write claims to a CSV file atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CLAIM_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(Path(file), text.getvalue().encode())


# a prompt adds something only if it scores more than the better one
REFERENCE_CONTROLS = "probe", "side-network"
# a control has its own head
_CONTROL_SETTING = tuple(f for f in SETTING_FIELDS if f != "head")


@lru_cache
def _read_version(file: Path, modified: int) -> list[dict]:
    """Return the records of a file, which many claims name; a changed file is read again."""
    return read_records(file)


def select_claim_records(
    claim: dict[str, str],  # its columns `records` and `keep` are used
    results_folder: Path | str,
) -> list[dict]:  # each with its `folder`
    """Return the records that a claim names; files that do not exist are skipped."""
    conditions = parse_conditions(claim["keep"])
    conditions.pop("by", None)  # no condition, but the fields that both sides share
    files: set[Path] = set()
    for pattern in claim["records"].split():
        files.update(Path(results_folder).glob(pattern))
    records = []
    for file in sorted(files):
        stored = _read_version(file.resolve(), file.stat().st_mtime_ns)
        records += [{**r, "folder": file.parent} for r in stored]
    return select_records(records, conditions)


def select_control_records(results_folder: Path | str) -> list[dict]:  # each with its `folder`
    """Return the records of the controls on all tasks."""
    return select_claim_records(dict(records="claims/controls-*.jsonl", keep=""), results_folder)


def _prefer_logits(records: list[dict]) -> list[dict]:
    """Return the records with logits, which can be paired by example; all if none has them.

    Runs that only served to choose a learning rate have none.
    """
    return [r for r in records if "logits" in r] or records


def measure_claim(
    claim: dict[str, str],
    results_folder: Path | str,
) -> tuple[dict | None, dict | None]:  # each as from `estimate_contrast`
    """Return the contrast of a claim, and that of its first side with the better control."""
    records = select_claim_records(claim, results_folder)
    shared_fields = tuple(parse_conditions(claim["keep"]).get("by", ()))
    setting_fields: tuple[str, ...] = SETTING_FIELDS
    a, b = claim["a"], claim["b"]
    heads = {paper_head(_paper_key(claim), side.split()[0]) for side in (a, b)}
    if len(heads) > 1:  # the paper itself compares methods with different heads
        setting_fields = _CONTROL_SETTING
    for selected in (_prefer_logits(records), records):
        estimate = estimate_contrast(
            selected,
            a,
            b,
            extra_setting_fields=shared_fields,
            setting_fields=setting_fields,
        )
        if estimate:
            break
    if not estimate:
        return None, None
    controls = select_control_records(results_folder)
    return estimate, _contrast_with_best_control(a, selected, controls, shared_fields)


def _mean_validation_score(records: list[dict]) -> float:
    return float(np.mean([r.get("validation", r["score"]) for r in records]))


def _best_control_per_setting(controls: list[dict]) -> list[dict]:
    """Return the records of the control with the best validation score in each setting."""
    settings: dict[tuple, dict[str, list[dict]]] = {}  # setting → method → records
    for r in controls:
        if r["method"] in REFERENCE_CONTROLS:
            methods = settings.setdefault(tuple(r.get(f) for f in _CONTROL_SETTING), {})
            methods.setdefault(r["method"], []).append(r)
    best = [max(methods.values(), key=_mean_validation_score) for methods in settings.values()]
    return [r for records in best for r in records]


def _contrast_with_best_control(
    side: str,  # a side of a contrast
    records: list[dict],
    controls: list[dict],  # records of controls
    shared_fields: tuple[str, ...],  # fields that both sides of the claim share, such as `layer`
) -> dict | None:
    """Return the contrast of a side with the better control of each setting.

    None if the side has another metric than the score, or samples that the controls lack.
    """
    if "@" in side:
        return None
    side_records = [r for r in records if r["method"] == side.split()[0]]
    values = {tuple(r.get(f) for f in shared_fields) for r in side_records}
    relabelled = [
        {**r, **dict(zip(shared_fields, value)), "method": "control"}
        for r in _best_control_per_setting(controls)
        for value in values  # a control has no layer, so it is compared at each of them
    ]
    estimate = estimate_contrast(
        side_records + relabelled,
        side,
        "control",
        extra_setting_fields=shared_fields,
        setting_fields=_CONTROL_SETTING,
    )
    split_seeds = {r.get("split_seed") or 0 for r in side_records}
    return estimate if estimate and estimate["draws"] == len(split_seeds) else None


def _paper_key(claim: dict[str, str]) -> str:
    """Return the paper of a claim as it begins the names of its tables: 'idpg', 'lpt' …."""
    return claim["paper"].lower()


def _measured_tasks(estimate: dict) -> list[str]:  # such as 'trec', or 'sst2→imdb'
    """Return the tasks of an estimate, each once."""
    tasks = []
    for setting in estimate["settings"]:
        target = f"→{setting['target']}" if setting["target"] else ""
        tasks.append(f"{setting['task']}{target}")
    return list(dict.fromkeys(tasks))


def _published_difference(
    claim: dict[str, str],
    tasks: list[str],  # from `_measured_tasks`
) -> float | None:
    """Return the paper's own mean difference on the measured tasks; None if it has none."""
    if not claim["printed"]:
        return None
    differences = printed_differences(claim["printed"])
    if not all(task in differences for task in tasks):
        return None
    return float(np.mean([differences[task] for task in tasks]))


def _paper_tasks(claim: dict[str, str]) -> set[str]:
    """Return the tasks of the table that a claim names, else all tasks of its paper."""
    if claim["printed"]:
        tasks = {*printed_differences(claim["printed"])} - {AVERAGE}
        if tasks:
            return tasks
    scores = load_published_scores()
    is_same_paper = scores.table.str.match(rf"{_paper_key(claim)}-\d")
    return {task_key(task) for task in scores[is_same_paper].task.unique()}


def _is_paper_setting(
    claim: dict[str, str], tasks: list[str], sides: tuple[list[dict], list[dict]]
) -> bool:
    """Return whether all records are of a task of the paper and have its kind of head."""
    paper = _paper_key(claim)
    has_paper_heads = all(
        r["head"] == paper_head(paper, r["method"]) for records in sides for r in records
    )
    return has_paper_heads and {*tasks} <= _paper_tasks(claim)


def _n_learning_rates(records: list[dict]) -> int:
    """Return how many learning rates the records of a side were chosen from."""
    counts = [1]
    for r in records:
        counts.append(len(r.get("learning_rates_tried") or ()))
        words = (r.get("lr_selection") or "").split()
        if words[:2] == ["best", "of"]:
            counts.append(int(words[2]))
    return max(counts)


def _format_numbers(values: set) -> str:
    return " and ".join(f"{value:g}" for value in sorted(values))


def _describe_side_trials(claim: dict[str, str], side: str, records: list[dict]) -> list[str]:
    """Return where the records of a side are not trained as the paper did."""
    paper = _paper_key(claim)
    table = claim["printed"].partition(":")[0] or f"{paper}-1"
    method = records[0]["method"]
    notes = []
    grid = select_paper_learning_rates(table, method)
    outside = {r["lr"] for r in records if r.get("lr")}
    outside = {lr for lr in outside if grid and not min(grid) <= lr <= max(grid)}
    if outside:
        notes.append(
            f"{side}: learning rate {_format_numbers(outside)}, outside of the paper's "
            f"{min(grid):g} to {max(grid):g}"
        )
    expected = paper_method_fields(method, table).get("prompt_length")
    lengths = {r["prompt_length"] for r in records if r.get("prompt_length")}
    if expected and lengths - {expected} and "prompt_length" not in claim[side]:
        notes.append(f"{side}: {_format_numbers(lengths)} prompt vectors, the paper {expected}")
    if paper == "lpt" and method == "prompt-tuning":
        notes.append(f"{side}: among the words, where LPT's prompt tuning is in front of them")
    return notes


def _describe_trials(claim: dict[str, str], sides: tuple[list[dict], list[dict]]) -> str:
    """Return where two sides had other trials than one another, or than in the paper."""
    notes = []
    tried = [{_n_learning_rates(records)} for records in sides]
    steps = []
    for records in sides:
        steps.append({r["steps"] for r in records if r.get("steps")})
    for name, values in (("learning rates tried", tried), ("steps", steps)):
        if values[0] != values[1]:
            notes.append(f"{name}: {' and '.join(_format_numbers(v) for v in values)}")
    for side, records in zip("ab", sides):
        notes += _describe_side_trials(claim, side, records)
    return "; ".join(notes)


BACKBONE_LABELS = {"minilm": "MiniLM", "smollm2": "SmolLM2 (4-bit, dequantised)"}
MAX_RISE = 1.0  # points of validation; above it a verdict names the steps of the training
TASK_LABELS = {name: label for label, name in TASK_NAMES.items()} | {"imdb": "IMDB"}


def _describe_scope(tasks: list[str], estimate: dict) -> str:  # 'TREC (100 examples) with MiniLM'
    """Return the tasks, training set sizes and backbones of an estimate."""
    labels = ["→".join(TASK_LABELS.get(t, t) for t in task.split("→")) for task in tasks]
    settings = estimate["settings"]
    backbones = dict.fromkeys(BACKBONE_LABELS.get(s["backbone"], s["backbone"]) for s in settings)
    sizes = sorted({s["shots"] for s in settings if s["shots"]})
    examples = f" ({' and '.join(map(str, sizes))} examples)" if sizes else ""
    return f"{', '.join(labels)}{examples} with {', '.join(backbones)}"


def _is_within_margin(estimate: dict) -> bool:
    """Return whether a difference in points is known to be smaller than the margin."""
    is_paired = estimate["interval_over"] == PAIRED_INTERVAL and estimate["points"]
    return is_paired and max(-estimate["low"], estimate["high"]) < EQUIVALENCE_MARGIN


def _late_rise(records: list[dict]) -> float | None:
    """Return what the last fifth of the training gained on validation, as a mean over runs."""
    gains = []
    for record in records:
        history = record.get("history") or []
        before = [score for step, score in history if step <= 0.8 * history[-1][0]]
        if before:
            gains.append(history[-1][1] - before[-1])
    return float(np.mean(gains)) if gains else None


def _describe_finding(
    estimate: dict,
    p: float | None,  # corrected p-value; None: too few runs
    scope: str,
    expected_sign: str,  # as in the column `says`
) -> str:  # such as 'lower on TREC with MiniLM'
    """Return what a contrast shows about the tasks and backbones of its records, and no more."""
    if p is None:
        word = "too few runs"
    elif p < 0.05:
        word = "higher" if estimate["effect"] > 0 else "lower"
    elif _is_within_margin(estimate):
        word = WITHIN
    else:
        word = "no significant difference"
    return f"{word} on {scope}"


def _correct_p_values(
    claims: list[dict[str, str]],
    estimates: dict[str, Any],  # id → estimate
) -> dict[str, float]:  # id → corrected p-value
    """Return the corrected p-values of the claims that have enough runs, by family."""
    families: dict[str, list[str]] = {}
    for claim in claims:
        if has_enough_runs(estimates.get(claim["id"])):
            families.setdefault(claim["family"], []).append(claim["id"])
    corrected: dict[str, float] = {}
    for ids in families.values():
        corrected |= zip(ids, adjust_p_values_holm([estimates[i]["p"] for i in ids]))
    return corrected


def _more_trials_may_explain(
    verdict: str,
    expected_sign: str,  # '>', '<', '=' or ''
    estimate: dict,
    n_tried: tuple[int, int],  # learning rates of the two sides
) -> bool:
    """Return whether a verdict may be due to the side that tried more learning rates.

    The best of more learning rates tends to be better, so they may explain a verdict in favour of
    that side, and not one against it.
    """
    if n_tried[0] == n_tried[1]:
        return False
    if expected_sign == "=" and verdict == "seen":
        return True
    # `seen` and `opposite` favour the better side, `not seen` the one that the claim has lower
    favours_a = expected_sign == "<" if verdict == "not seen" else estimate["effect"] > 0
    return favours_a == (n_tried[0] > n_tried[1])


def _describe_missing_headroom(
    claim: dict[str, str], sides: tuple[list[dict], list[dict]], controls: list[dict]
) -> str:
    """Return why no side is known to score above a control of its setting; '' if one does.

    Prompts that have learnt less than a probe cannot show which of them is the better one.
    """
    settings = {tuple(r.get(f) for f in _CONTROL_SETTING) for r in sides[0]}
    in_setting = [r for r in controls if tuple(r.get(f) for f in _CONTROL_SETTING) in settings]
    best = _best_control_per_setting(in_setting)
    metric = [word for word in claim["a"].split() if word.startswith("@")]
    relabelled = [{**r, "method": "control"} for r in best]
    control = mean_of_side(relabelled, " ".join(["control", *metric]))
    means = [mean_of_side(records, claim[side]) for records, side in zip(sides, "ab")]
    scores = [mean for mean in means if mean is not None]
    if control is None:
        return "no control was run in this setting"
    if len(scores) < 2 or max(scores) > control:
        return ""
    text = " and ".join(f"{score:.1f}" for score in scores)
    return f"no side scores above the control ({text}, control {control:.1f})"


def _explain_open(
    claim: dict[str, str],
    verdict: str,  # that the numbers alone give
    estimate: dict,
    sides: tuple[list[dict], list[dict]],
    controls: list[dict],
) -> str:  # '': nothing
    """Return what leaves a claim open whose numbers would give a verdict."""
    if verdict == "open":
        return ""
    if verdict == WITHIN:
        return ""
    reasons = []
    if estimate["interval_over"] == "seeds":
        reasons.append("the interval is over seeds alone")
    n_tried = _n_learning_rates(sides[0]), _n_learning_rates(sides[1])
    if _more_trials_may_explain(verdict, claim["says"], estimate, n_tried):
        reasons.append(f"unequal numbers of learning rates ({n_tried[0]} and {n_tried[1]})")
    if verdict == "not seen":
        reasons.append(_describe_missing_headroom(claim, sides, controls))
    return "; ".join(filter(None, reasons))


def _describe_headroom_of_equality(
    claim: dict[str, str],
    verdict: str,
    sides: tuple[list[dict], list[dict]],
    controls: list[dict],
) -> str:
    """Return that two equal sides are below a control; it limits the verdict, but stands."""
    return _describe_missing_headroom(claim, sides, controls) if verdict == WITHIN else ""


def _is_own_sample(claim: dict[str, str], estimate: dict) -> bool:
    """Return whether a claim of IDPG, whose few-shot tables have one sample, is judged on one."""
    return claim["paper"] == "IDPG" and estimate["draws"] == 1 and estimate["runs"] >= 5


def _decide_claim(
    claim: dict[str, str], estimate: dict, published: float | None, p: float | None
) -> str:
    """Return the verdict that the numbers give, before what leaves a claim open."""
    verdict = decide_verdict(estimate, published, claim["says"], p)
    is_enough = has_enough_runs(estimate) or _is_own_sample(claim, estimate)
    is_significant = (estimate["p"] if p is None else p) < 0.05
    if verdict in ("open", "not seen") and is_enough and not is_significant:
        return WITHIN if _is_within_margin(estimate) else verdict
    return verdict


def _judge_speed(claim: dict[str, str], results_folder: Path | str) -> dict[str, str]:
    """Return the computed columns of a claim on a ratio of times."""
    name, conditions = SPEED_RATIOS[claim["id"]]
    file = Path(results_folder) / name
    records = read_records(file) if file.exists() else []
    record = next((r for r in records if conditions.items() <= r.items()), None)
    if record is None:
        return dict(verdict="not run")
    ratio = f"{record['ratio']:.2f} ({record['backbone']} on a CPU)"
    if record.get("paper"):
        ratio += f"; the paper's table: {record['paper']:.2f}"
    return dict(
        backbones=record["backbone"],
        recomputed=ratio,
        verdict=ON_A_CPU if record["ratio"] > 1 else "open",
    )


def _judge_measured(
    claim: dict[str, str],
    estimate: dict | None,
    above_control: dict | None,
    p: float | None,  # corrected p-value
    records: list[dict],
    controls: list[dict],
) -> dict[str, str]:  # the computed columns that are not empty
    """Return the computed columns of a claim that is measured here."""
    if not estimate:
        return dict(verdict="not run")
    tasks = _measured_tasks(estimate)
    settings = estimate["settings"]
    measured = {(s["task"], s["target"]) for s in settings}
    same_tasks = [r for r in records if (r["task"], r.get("target")) in measured]
    sides = select_side(same_tasks, claim["a"]), select_side(same_tasks, claim["b"])
    published = _published_difference(claim, tasks)
    scope = _describe_scope(tasks, estimate)
    verdict = "open"
    finding = reason = ""
    claimed_sign = {">": 1, "<": -1}.get(claim["says"], 0)
    if not _is_paper_setting(claim, tasks, sides):
        finding = _describe_finding(estimate, p, scope, claim["says"])
    elif claimed_sign * (published or 0) >= 0:  # else the paper itself prints the other sign here
        verdict = _decide_claim(claim, estimate, published, p)
        reason = _explain_open(claim, verdict, estimate, sides, controls)
    rises = [_late_rise(records) for records in sides]
    above = ""
    if above_control:
        above = "{effect:+.1f} ({low:+.1f} … {high:+.1f})".format_map(above_control)
    return dict(
        tasks=" ".join(tasks),
        backbones=" ".join(dict.fromkeys(str(s["backbone"]) for s in settings)),
        runs=str(estimate["runs"]),
        texts=str(estimate["texts"]),
        interval_over=estimate["interval_over"],
        **{k: f"{estimate[k]:.4f}" for k in ("effect", "low", "high", "detectable")},
        above=above,
        p="" if p is None else f"{p:.4f}",
        published="" if published is None else f"{published:+.1f}",
        steps=_format_numbers({r["steps"] for side in sides for r in side if r.get("steps")}),
        rise=" and ".join("–" if rise is None else f"{rise:+.1f}" for rise in rises),
        trials=_describe_trials(claim, sides),
        verdict="open" if reason else verdict,
        reason=reason or _describe_headroom_of_equality(claim, verdict, sides, controls),
        scope=scope,
        finding=finding,
    )


def judge_claims(
    claims: list[dict[str, str]],  # from `read_claims`
    results_folder: Path | str,  # folder of the records
) -> list[dict[str, str]]:  # new rows
    """Compute every column of `COMPUTED_COLUMNS` from the records and the published numbers."""
    measured = {c["id"]: measure_claim(c, results_folder) for c in claims if c["a"]}
    estimates = {i: estimate for i, (estimate, _) in measured.items()}
    p_values = _correct_p_values(claims, estimates)
    controls = select_control_records(results_folder)
    judged = []
    for claim in claims:
        computed = dict.fromkeys(COMPUTED_COLUMNS, "")
        if claim["a"]:
            records = _prefer_logits(select_claim_records(claim, results_folder))
            p = p_values.get(claim["id"])
            own_controls = [r for r in records if r["method"] in REFERENCE_CONTROLS]
            computed |= _judge_measured(
                claim, *measured[claim["id"]], p, records, controls + own_controls
            )
        elif claim["id"] in SPEED_RATIOS:
            computed |= _judge_speed(claim, results_folder)
        elif claim["kind"] == MEASURED:  # its records, if any, are described in `decides`
            has_records = bool(select_claim_records(claim | dict(keep=""), results_folder))
            computed["verdict"] = "open" if has_records else "not run"
        else:
            check = check_statement(claim["id"])
            computed["recomputed"] = check.recomputed
            computed["verdict"] = "agrees" if check.agrees else "differs"
        if computed["verdict"] in ("open", "not run") and claim["beyond"]:
            computed["verdict"] = OUT_OF_REACH
        if computed["verdict"] in ("open", "not run") and not claim["decides"]:
            raise UserError(
                f"claim {claim['id']!r} is {computed['verdict']} with these records. State in its "
                "column `decides` what would decide it, or restore the records that it names."
            )
        judged.append({**claim, **computed})
    return judged


def count_verdicts(
    rows: list[dict[str, str]],  # judged claims
) -> dict[str, Counter]:  # kind: number of claims by verdict
    """Count the verdicts of each kind of claim, so that arithmetic does not count as a run."""
    counts: dict[str, Counter] = {kind: Counter() for kind in CLAIM_KINDS}
    for row in rows:
        counts[row["kind"]][row["verdict"]] += 1
    return counts


def count_contrasts(
    rows: list[dict[str, str]],  # judged claims
) -> Counter:  # number of contrasts by verdict
    """Count the verdicts of the claims that are measured here, the same contrast once.

    Claims on the same two sides of the same records are one contrast.
    """
    verdicts: dict[tuple, str] = {}
    for row in rows:
        if row["kind"] == MEASURED:
            contrast = tuple(row[column] for column in ("a", "b", "keep", "records"))
            verdicts[contrast if row["a"] else (row["id"],)] = row["verdict"]
    return Counter(verdicts.values())


def format_claim_effect(
    claim: dict[str, str],  # a judged claim
) -> str:
    """Return effect and interval in points, the number of runs and the smallest visible effect."""
    if not claim["effect"]:
        return "–"
    effect, low, high, detectable = [
        float(claim[c]) for c in ("effect", "low", "high", "detectable")
    ]
    n = 1 if detectable >= 0.5 else 2
    over = ""
    if claim["interval_over"] != PAIRED_INTERVAL:
        over = f" over {claim['interval_over']}"
    return (
        f"{effect:+.{n}f} ({low:+.{n}f} … {high:+.{n}f}){over}; {claim['runs']} runs, detectable: "
        f"{detectable:.{n}f}"
    )


def format_verdict(
    claim: dict[str, str],  # a judged claim
) -> str:  # such as 'opposite on TREC with SmolLM2 (4-bit, dequantised), after 600 steps'
    """Return the verdict of a claim with the tasks and backbones that it applies to.

    It names the steps if a side still gained more than a point in the last fifth of them.
    """
    if claim["verdict"] not in ("seen", "not seen", "opposite", WITHIN):
        return claim["verdict"]
    rises = [float(rise) for rise in claim["rise"].split(" and ") if rise not in ("", "–")]
    after = f", after {claim['steps']} steps" if max(rises, default=0) > MAX_RISE else ""
    outside = ", at learning rates outside of the paper's" if "outside" in claim["trials"] else ""
    return f"{claim['verdict']} on {claim['scope']}{after}{outside}"


def update_claims(
    file: Path | str,  # a file of claims; the records are in its folder
) -> None:
    """Compute effects and verdicts of claims from the records, and write and print them."""
    before = read_claims(file)
    after = judge_claims(before, Path(file).parent)
    for old, new in zip(before, after):
        if new["effect"]:
            note = new["finding"] or new["reason"]
            note = f"; {note}" if note else ""
            changed = f" (was {old['verdict']})" if old["verdict"] != new["verdict"] else ""
            verdict = f"{format_verdict(new)}{changed}{note}"
            print(f"{new['id']:24} {format_claim_effect(new):38} {verdict}")
    write_claims(after, file)
    for kind, verdicts in count_verdicts(after).items():
        print(f"{kind}: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()))
    print(f"written: {file}")


def main() -> None:
    """Update a file of claims."""
    parser = argparse.ArgumentParser(description="Compute the verdicts on claims from the records.")
    default = Path(__file__).resolve().parents[1] / "claims.csv"
    parser.add_argument("file", nargs="?", default=default, help="a file of claims")
    args = parser.parse_args()
    exit_with_message("verdicts.py", lambda: update_claims(args.file))


if __name__ == "__main__":
    main()
