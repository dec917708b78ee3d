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


def gains_of_a_text() -> list[float]:
    """Return by how many points the mean of a prompt rises if it begins from a text, sorted."""
    random = load_scores("trec-random")
    return sorted(
        mean(scores) - mean(random[method]) for method, scores in load_scores("trec-text").items()
    )


def render_table() -> str:
    """Return the table in Markdown, mean and standard deviation over the seeds, and a sentence."""
    columns = [load_scores(folder) for folder in COLUMNS]
    lines = [f"| method | {' | '.join(COLUMNS.values())} |", f"|---|{'--:|' * len(COLUMNS)}"]
    for method in METHODS:
        values = [scores.get(method) for scores in columns]
        cells = [f"{mean(v):.1f} ± {stdev(v):.1f}" if v else "–" for v in values]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    gains = gains_of_a_text()
    counts = [len(next(iter(scores.values()))) for scores in columns]
    sentence = (
        f"Accuracy in %, mean and standard deviation of {counts[0]} seeds ({counts[-1]} on "
        f"`two-domains`). With {counts[0]} seeds, differences below about two points may be "
        f"chance: so may the {gains[0]:.1f} to {gains[-1]:.1f} points that prompts gain when they "
        "begin from a text."
    )
    return "\n".join([*lines, "", sentence])


def render_page() -> str:
    """Return the page with the table of the stored records."""
    first, last = MARKS
    pattern = re.compile(f"{first}.*?{last}", re.DOTALL)
    return pattern.sub(f"{first}\n{render_table()}\n{last}", FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(render_page(), encoding="utf-8")
