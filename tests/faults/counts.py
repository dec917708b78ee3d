"""Print the counts of the campaigns, which counts.jsonl has."""

import json
from collections import Counter
from pathlib import Path

COUNTS = Path(__file__).with_name("counts.jsonl")
COLUMNS = {  # of the table: the campaign, and the start of its outcomes
    "killed before": ("kills", "kill"),
    "killed half-way": ("kills", "half"),
    "power cut": ("kills", "power"),
    "disk full": ("kills", "refuse"),
    "two processes": ("pairs", ""),
    "damaged files": ("damaged", ""),
    "malicious inputs": ("malicious", ""),
}


def read_counts():
    """Return a record for each campaign and workload."""
    return [json.loads(l) for l in COUNTS.read_text(encoding="utf-8").splitlines()]


def column_of(campaign, fault):
    """Return the column of the table for a fault of a campaign; the fault itself if it has none."""
    for column, (kind, start) in COLUMNS.items():
        if kind == campaign and fault.startswith(start):
            return column
    return fault


def count_cases():
    """Return the cases by work and column, and those by fault and outcome."""
    cases = Counter()
    outcomes = Counter()
    for line in read_counts():
        for key, n in line["outcomes"].items():
            fault, _, outcome = key.partition(": ")
            column = column_of(line["campaign"], fault)
            cases[line["work"], column] += n
            label = (
                f"{column}, {fault}" if column in ("damaged files", "malicious inputs") else column
            )
            outcomes[label, outcome] += n
    return cases, outcomes


def table():
    """Return a table of the cases by work and fault, and a list of their outcomes."""
    cases, outcomes = count_cases()
    failures = sum(line["bad"] for line in read_counts())
    works = [w for w in dict.fromkeys(l["work"] for l in read_counts()) if w != "input"]
    rows = [[w, *(cases[w, c] for c in COLUMNS)] for w in works]
    rows.append(["**all**", *(sum(r[i] for r in rows) for i in range(1, len(COLUMNS) + 1))])
    out = [f"| workload | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    out += [f"| {' | '.join(f'{v:,}' if isinstance(v, int) else v for v in r)} |" for r in rows]
    out += ["", f"Outcomes ({failures:,} broke a promise):", ""]
    for label in dict.fromkeys(label for label, _ in outcomes):
        counts = [f"{n:,} {o}" for (name, o), n in sorted(outcomes.items()) if name == label]
        counts = [text.replace(" was refused", " refused") for text in counts]
        out.append(f"- {label}: {', '.join(counts)}")
    return "\n".join([*out, ""])


if __name__ == "__main__":
    print(table())
