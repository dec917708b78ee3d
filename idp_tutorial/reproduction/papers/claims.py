"""A table of the papers' claims, with the verdict that the project's records give on each.

A claim is a row of `results/claims.csv`. A claim that can be measured names the records and the
two sides of a contrast; `judge_claims` computes the other columns from them:

`idp reproduce --claims results/claims.csv` reads the records, writes the file again, and prints
which verdicts changed.
"""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.conclusions import VERDICT_MEANINGS, decide_verdict, has_enough_runs
from idp_tutorial.runs.contrasts import (
    SETTING_FIELDS,
    adjust_p_values_holm,
    estimate_contrast,
    has_per_example_results,
)
from idp_tutorial.utils.checks import UserError, check_choice
from idp_tutorial.utils.durable import write_atomically
from idp_tutorial.utils.records import parse_conditions, read_records

__all__ = [
    "read_claims",
    "write_claims",
    "judge_claims",
    "format_claim_effect",
    "render_claims_page",
]


COMPUTED_COLUMNS = (
    "tasks",
    "backbones",
    "runs",
    "texts",
    "effect",
    "low",
    "high",
    "p",
    "detectable",
    "above",
    "verdict",
)
CLAIM_COLUMNS = (
    "id",
    "paper",
    "where",
    "sentence",
    "contrast",
    "says",
    "published",
    "family",
    "a",
    "b",
    "keep",
    "records",
    *COMPUTED_COLUMNS,
    "decides",
)


def _first_empty_column(row: dict[str, str]) -> str | None:
    """Return the name of a column that must have a value in this row and has none."""
    required = ["id", "paper", "where", "sentence", "contrast"]
    if row["a"]:
        required += ["b", "family", "records"]
    if row["verdict"] == "open":
        required.append("decides")
    return next((column for column in required if not row[column]), None)


def read_claims(
    file: Path | str,  # CSV file with the columns `CLAIM_COLUMNS`
) -> list[dict[str, str]]:  # column → value, numbers as text
    """Read the claims of a file, and raise `UserError` for a row that is not complete."""
    with open(file, encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    if not rows:
        raise UserError(
            f"{file} holds no claims. Give a CSV file such as results/claims.csv, with a row per "
            f"claim and the columns {', '.join(CLAIM_COLUMNS)}."
        )
    ids = set()
    for line, row in enumerate(rows, 2):
        if tuple(row) != CLAIM_COLUMNS or None in row.values():
            raise UserError(
                f"{file}, line {line} has the columns {', '.join(map(str, row))}, but it needs "
                f"{', '.join(CLAIM_COLUMNS)}."
            )
        check_choice(row["verdict"], VERDICT_MEANINGS, f"verdict of claim {row['id']}")
        check_choice(row["says"], ("", ">", "<", "="), f"sign (`says`) of claim {row['id']}")
        if row["id"] in ids:
            raise UserError(
                f"{file}, line {line}: the id {row['id']!r} is used twice. Give the claim another "
                "id."
            )
        if empty := _first_empty_column(row):
            raise UserError(
                f"{file}, line {line}: claim {row['id']!r} has no {empty}. Every claim needs its "
                "source, and an open claim needs `decides`: what would decide it."
            )
        ids.add(row["id"])
    return rows


def write_claims(rows: list[dict[str, str]], file: Path | str) -> None:
    """Write claims to a CSV file atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CLAIM_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(Path(file), text.getvalue().encode())


CONTROL_RECORDS_GLOB = "claims/controls-*.jsonl"  # below the folder of the results
REFERENCE_CONTROLS = "probe", "side-network"  # a prompt must exceed the better one to add something


def _parse_conditions(conditions: str) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the conditions of a claim's `keep` column, and the fields of `by=`."""
    parsed = parse_conditions(conditions)
    return parsed, tuple(parsed.pop("by", ()))


def select_claim_records(
    claim: dict[str, str],  # its columns `records` and `keep` are used
    results_folder: Path | str,
) -> list[dict]:  # each with its `folder`
    """Return the records that a claim names; files that do not exist are skipped."""
    conditions, _ = _parse_conditions(claim["keep"])
    files: set[Path] = set()
    for pattern in claim["records"].split():
        files.update(Path(results_folder).glob(pattern))
    records = [{**r, "folder": f.parent} for f in sorted(files) for r in read_records(f)]
    return [r for r in records if all(str(r.get(k)) in v for k, v in conditions.items())]


def load_tasks_for_labels(
    records: list[dict],  # each with its `folder`
    data_folder: str | None,  # folder of the tasks; None: no task is loaded
) -> dict[str, Task]:  # by name
    """Load the tasks of records whose logits were stored without labels."""
    tasks: dict[str, Task] = {}
    for r in records if data_folder else ():
        if r["task"] in tasks or has_per_example_results(r, r["folder"]):
            continue
        if has_per_example_results(r, r["folder"], has_labels=True):
            tasks[r["task"]] = load_task(
                r["task"], data_folder, r.get("shots"), r.get("split_seed") or 0
            )
    return tasks


def measure_claim(
    claim: dict[str, str],
    results_folder: Path | str,
    data_folder: str | None = None,  # folder of the tasks, for logits stored without labels
) -> tuple[dict | None, dict | None]:  # each as from `estimate_contrast`
    """Return the contrast of a claim, and that of its first side with the better control."""
    records = select_claim_records(claim, results_folder)
    tasks = load_tasks_for_labels(records, data_folder)
    shared_fields = _parse_conditions(claim["keep"])[1]
    with_logits = [r for r in records if "logits" in r]  # preferred: they allow pairing by example
    a = claim["a"]
    estimate = estimate_contrast(
        with_logits, a, claim["b"], tasks, extra_setting_fields=shared_fields
    )
    if not estimate:
        estimate = estimate_contrast(
            records, a, claim["b"], tasks, extra_setting_fields=shared_fields
        )
    if not estimate:
        return None, None
    controls = select_claim_records(dict(records=CONTROL_RECORDS_GLOB, keep=""), results_folder)
    return estimate, _contrast_with_best_control(a, records, controls, tasks, shared_fields)


def _best_control_per_setting(
    controls: list[dict],
    setting_fields: tuple[str, ...],
) -> list[list[dict]]:
    """Return the records of the control with the best validation score, for each setting."""
    settings: dict[tuple, dict[str, list[dict]]] = {}  # setting → method → records
    for r in controls:
        if r["method"] in REFERENCE_CONTROLS:
            methods = settings.setdefault(tuple(r.get(f) for f in setting_fields), {})
            methods.setdefault(r["method"], []).append(r)

    def mean_validation_score(records: list[dict]) -> float:
        """Return the mean validation score of some runs."""
        return float(np.mean([r.get("validation", r["score"]) for r in records]))

    return [max(methods.values(), key=mean_validation_score) for methods in settings.values()]


def _contrast_with_best_control(
    side: str,  # a side of a contrast
    records: list[dict],
    controls: list[dict],  # records of controls
    tasks: dict[str, Task],
    shared_fields: tuple[str, ...],  # fields that both sides of the claim share, such as `layer`
) -> dict | None:
    """Return the contrast of a side with the better control of each setting.

    None if the side has another metric than the score, or samples that the controls lack.
    """
    if "@" in side:
        return None
    side_records = [r for r in records if r["method"] == side.split()[0]]
    values = {tuple(r.get(f) for f in shared_fields) for r in side_records}
    setting_fields = tuple(f for f in SETTING_FIELDS if f != "head")  # a control has its own head
    relabelled = []
    for control_records in _best_control_per_setting(controls, setting_fields):
        for r in control_records:
            for value in values:  # a control has no layer, so it is compared at each of them
                relabelled.append({**r, **dict(zip(shared_fields, value)), "method": "control"})
    estimate = estimate_contrast(
        side_records + relabelled,
        side,
        "control",
        tasks,
        extra_setting_fields=shared_fields,
        setting_fields=setting_fields,
    )
    split_seeds = {r.get("split_seed") or 0 for r in side_records}
    return estimate if estimate and estimate["draws"] == len(split_seeds) else None


def _format_computed_columns(
    estimate: dict | None,  # of the claim
    above_control: dict | None,  # of its first side and the better control
) -> dict[str, str]:  # without the verdict
    if not estimate:
        return dict.fromkeys(COMPUTED_COLUMNS, "")
    settings = [dict(zip(SETTING_FIELDS, s)) for s in estimate["settings"]]
    tasks = [s["task"] + (f"→{s['target']}" if s["target"] else "") for s in settings]
    above = ""
    if above_control:
        low, high = above_control["low"], above_control["high"]
        above = f"{above_control['effect']:+.1f} ({low:+.1f} … {high:+.1f})"
    return dict(
        tasks=" ".join(dict.fromkeys(tasks)),
        backbones=" ".join(dict.fromkeys(str(s["backbone"]) for s in settings)),
        runs=str(estimate["runs"]),
        texts=str(estimate["texts"]),
        **{k: f"{estimate[k]:.2f}" for k in ("effect", "low", "high", "detectable")},
        p=f"{estimate['p']:.4f}",
        above=above,
        verdict="",
    )


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


def judge_claims(
    claims: list[dict[str, str]],  # from `read_claims`
    results_folder: Path | str,  # folder of the records
    data_folder: str | None = None,  # folder of the tasks, for logits stored without labels
) -> list[dict[str, str]]:  # new rows
    """Compute effect, interval and verdict of every claim that names two sides.

    Other claims stay as they are.
    """
    measured = {c["id"]: measure_claim(c, results_folder, data_folder) for c in claims if c["a"]}
    estimates = {i: estimate for i, (estimate, _) in measured.items()}
    p_values = _correct_p_values(claims, estimates)
    judged = []
    for claim in claims:
        if not claim["a"]:
            judged.append(claim)
            continue
        estimate, above_control = measured[claim["id"]]
        published = float(claim["published"]) if claim["published"] else None
        p = p_values.get(claim["id"])
        row = {
            **claim,
            **_format_computed_columns(estimate, above_control),
            "verdict": decide_verdict(estimate, published, claim["says"], p),
            "p": "" if p is None else f"{p:.4f}",
        }
        if row["verdict"] == "open" and not row["decides"]:
            raise UserError(
                f"claim {row['id']!r} is open with these records. State in its column `decides` "
                "what would decide it, or restore the records that it names."
            )
        judged.append(row)
    return judged


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
    return (
        f"{effect:+.{n}f} ({low:+.{n}f} … {high:+.{n}f}); {claim['runs']} runs, visible from "
        f"{detectable:.{n}f}"
    )


def _format_sources(claim: dict[str, str]) -> str:
    """Return what the records of a claim are, and what would decide it or add to it."""
    parts = []
    if claim["effect"] or not claim["a"]:  # otherwise its records do not exist yet
        settings = f"{claim['tasks']} with {claim['backbones']}: " if claim["tasks"] else ""
        # backticks, because Markdown would read `*` as emphasis
        files = [f"`{w}`" if w.endswith(".jsonl") else w for w in claim["records"].split()]
        parts.append(settings + " ".join(files))
    if claim["decides"]:
        purpose = "decide it" if claim["verdict"] == "open" else "say more"
        parts.append(f"to {purpose}: {claim['decides']}")
    return "; ".join(part for part in parts if part)


def _format_claim_row(claim: dict[str, str]) -> str:
    cells = [
        f'<a id="{claim["id"]}"></a>“{claim["sentence"]}” ({claim["where"]}). '
        f"*{claim['contrast']}*",
        claim["published"] or "–",
        format_claim_effect(claim),
        claim["above"] or "–",
        f"**{claim['verdict']}**",
        _format_sources(claim),
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def render_claims_page(
    rows: list[dict[str, str]],  # from `read_claims`
) -> str:
    """Return the claims as Markdown tables, one per paper; every row has its id as an anchor."""
    head = (
        "| claim | published | ours (95 %) | above the control | verdict | records, and what would "
        "say more |\n|---|--:|--:|--:|---|---|\n"
    )
    parts = []
    for paper in dict.fromkeys(row["paper"] for row in rows):
        lines = [_format_claim_row(row) for row in rows if row["paper"] == paper]
        parts.append(f"## {paper}\n\n{head}" + "\n".join(lines))
    return "\n\n".join(parts)
