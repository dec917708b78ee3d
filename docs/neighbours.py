"""Write the measured scores of `docs/neighbours.md`, from the records of `results/neighbours`."""

import re
from pathlib import Path
from statistics import mean, stdev

from idp_tutorial.utils.records import read_existing_records

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("neighbours.md")
MARKS = "<!-- scores -->", "<!-- end of scores -->"
METHODS = "prompt-tuning", "p-tuning-v2", "cartridge", "lora", "shadow", "s-idpg-phm"
COLUMNS = {  # folder of records: heading
    "trec-random": "TREC, MiniLM",
    "trec-text": "TREC, from a text",
    "two-domains": "`two-domains`, tiny",
}


def load_scores(
    folder: str,  # key of `COLUMNS`
) -> dict[str, list[float]]:
    """Return the scores of each method, one for each seed."""
    scores: dict[str, list[float]] = {}
    file = ROOT / f"results/neighbours/{folder}/compare.jsonl"
    for record in read_existing_records(file):
        scores.setdefault(record["method"], []).append(record["score"])
    return scores


def render_table() -> str:
    """Return the table in Markdown: mean and standard deviation over the seeds."""
    columns = [load_scores(folder) for folder in COLUMNS]
    lines = [f"| method | {' | '.join(COLUMNS.values())} |", f"|---|{'--:|' * len(COLUMNS)}"]
    for method in METHODS:
        values = [scores.get(method) for scores in columns]
        cells = [f"{mean(v):.1f} ± {stdev(v):.1f}" if v else "–" for v in values]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_page() -> str:
    """Return the page with the table of the stored records."""
    first, last = MARKS
    pattern = re.compile(f"{first}.*?{last}", re.DOTALL)
    return pattern.sub(f"{first}\n{render_table()}\n{last}", FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(render_page(), encoding="utf-8")
