"""Print memory and speed of encoding and prediction: `python tests/faults/memory.py [--rows N]`.

The numbers are for docs/promises.md. The script takes minutes, with one thread.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = [
    "the",
    "soup",
    "was",
    "cold",
    "and",
    "nobody",
    "came",
    "to",
    "take",
    "it",
    "away",
    "before",
    "the",
    "beer",
    "arrived",
    "at",
    "our",
    "table",
    "again",
    "today",
]
ENV = os.environ | dict(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).resolve().parents[2])
)


def texts(n, words):
    draw = random.Random(0)
    return (" ".join(draw.choices(WORDS, k=words)) for _ in range(n))


def resident(pid="self"):
    """Return the memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def encoding(n):
    """Print the memory of 1,000 encoded rows of 20 tokens, and the peak."""
    import gc
    import resource

    from idp_tutorial.backbones.load import load_backbone
    from idp_tutorial.data.tasks import load_task
    from idp_tutorial.training.examples import encode_rows

    bb = load_backbone("tiny")
    task = load_task("sentiment")
    rows = [dict(sentence1=t, label=i % 2) for i, t in enumerate(texts(n, 18))]
    encode_rows(task, rows[:3000], bb, 128)
    gc.collect()
    before = resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    examples = encode_rows(task, rows, bb, 128)
    gc.collect()
    tokens = sum(len(e["input_ids"]) for e in examples[:1000]) / 1000
    worst = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - max(before, peak))
    print(
        f"encoding {n:,} rows of {tokens:.0f} tokens: "
        f"{(resident() - before) / n * 1000:.2f} MB for 1,000 rows, "
        f"{worst / n * 1000:.2f} at the peak"
    )


def answering(model, n, words, samples=5):
    """Send rows through a pipe; return processor seconds, peak MB and MB on the way."""
    p = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "idp_tutorial",
            "predict",
            "--model",
            model,
            "--texts",
            "-",
            "--format",
            "lines",
            "--device",
            "cpu",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=ENV,
    )
    seen = []
    for i, text in enumerate(texts(n, words), 1):
        p.stdin.write(text + "\n")
        if not i % (max(1, n // samples)):
            p.stdin.flush()
            seen.append(f"{resident(p.pid):,.0f} MB after {i:,}")
    p.stdin.close()
    _, status, used = os.wait4(p.pid, 0)
    assert status == 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, ", ".join(seen)


def main(n):
    subprocess.run([sys.executable, __file__, "--encode", str(n)], env=ENV, check=True)
    with tempfile.TemporaryDirectory() as folder:
        train = (
            "-m idp_tutorial train --task sentiment --method lpt-npg --steps 4 "
            "--evaluations 1 --out"
        )
        subprocess.run(
            [sys.executable, *train.split(), folder], env=ENV, check=True, stdout=subprocess.DEVNULL
        )
        start, _, _ = answering(folder, 1, 18, 1)
        seconds, _, _ = answering(folder, n // 10, 18)
        print(
            f"predicting {n // 10:,} rows of 20 tokens: {n / 10 / (seconds - start):,.0f} texts a "
            "processor second"
        )
        _, peak, seen = answering(folder, n, 4, 10)
        print(f"predicting {n:,} rows of 6 tokens: {seen}; at most {peak:,.0f} MB")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--rows", type=int, default=100_000)
    p.add_argument("--encode", type=int, help="encode this number of rows in this process")
    o = p.parse_args()
    encoding(o.encode) if o.encode else main(o.rows)
