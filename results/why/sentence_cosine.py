"""Score STS-B by the cosine of MiniLM's two sentence vectors, without any training.

    python results/why/sentence_cosine.py --data FOLDER

A control of question B: the methods there read both sentences of a pair in one pass, while MiniLM
was trained to place similar sentences close to each other, each in a pass of its own. The result is
written to `results/why/sentence-cosine.json`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity

from idp_tutorial import load_backbone
from idp_tutorial.assembly.probe import pool_all_layers
from idp_tutorial.data.tasks import load_task
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.utils.records import collect_provenance

FILE = Path(__file__).parent / "sentence-cosine.json"


def main() -> None:
    """Compute the cosine of each test pair and compare it with the labels."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    args = parser.parse_args()
    start_time = time.perf_counter()
    bb = load_backbone("minilm")
    task = load_task("stsb", args.data, shots=1000)
    rows = task.splits["test"]
    vectors = []
    for column in task.text_columns:
        sentences = [{"sentence1": row[column], "label": row["label"]} for row in rows]
        examples = encode_rows(task, sentences, bb, max_len=128)
        vectors.append(pool_all_layers(bb, examples, poolings=("mean",))[:, -1, 0].float())
    first, second = vectors
    cosines = cosine_similarity(first, second)
    scores = task.score(cosines.tolist(), [row["label"] for row in rows])
    result = dict(task="stsb", backbone=bb.name, pairs=len(rows), scores=scores)
    result |= dict(digests=dict(data=task.digest()))
    result |= collect_provenance(start_time, torch.get_num_threads())
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    print(scores)


if __name__ == "__main__":
    main()
