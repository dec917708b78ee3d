"""Show who reads the text, in two minutes: static and generated prompts before three layers.

    python results/crossing/who_reads.py

The bundled model `tiny` has eight frozen layers. It classifies questions (six classes) by the word
that it predicts, without a trained head. A static and a generated prompt (LPT's NPG) are trained
before layers 7, 4 and 0 with one seed; a probe and a side network, which use no prompt, are their
controls. A second call prints the stored runs. With five seeds and five learning rates, the same
curves are in `nbs/lab/depth.ipynb`.
"""

import argparse
import logging
import multiprocessing
import os
import textwrap
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import crossing
import torch

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.record import RunStore
from idp_tutorial.utils.records import read_records

LEARNING_RATES = {"lpt": 0.3, "lpt-npg": 0.007}  # the best of five at most layers
NAMES = {"lpt": "static prompt", "lpt-npg": "generated prompt"}
CONTROLS = {"probe": "probe", "side-network": "side network"}
LAYERS = (7, 4, 0)
N_LAYERS = 8
HEADER = "accuracy  method            frozen layers above"
Scores = Mapping[tuple[str, int], float]  # method, layer: accuracy in percent


def train_control(args: argparse.Namespace, method: str) -> dict:
    """Train a control, or return its stored record."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    cfg = RunConfig(method, task=args.task, backbone="tiny", steps=args.steps, cache="both")
    store = RunStore(args.out / "controls.jsonl")
    return run_seeds(cfg, load_task(args.task), "default", 1, store)[0]


def describe(scores: Scores, controls: Mapping[str, float]) -> str:
    """Return what the scores say, in three sentences."""

    def compare(layer: int) -> str:
        static, generated = scores["lpt", layer], scores["lpt-npg", layer]
        above = N_LAYERS - layer
        return (
            f"With {above} frozen layer{'s' * (above > 1)} above it, a generated prompt scores "
            f"{generated:.0f} % and a static one {static:.0f} %."
        )

    gain = scores["lpt-npg", 7] - scores["lpt", 7]
    if gain < 10:
        lesson = "In this run, generating the prompt gained less than ten points: train longer."
    else:
        lesson = (
            "Something has to read the text: the frozen layers above a static prompt, or the "
            "layers and the network below a generated one."
        )
    best = max(controls, key=lambda name: controls[name])
    score = f"{controls[best]:.0f} %"
    end = f"Without a prompt, a {CONTROLS[best]} of the frozen states scores {score}."
    first = (
        "Before layer 0 the generator reads the state of `<s>`, which is the same in every text, "
        "so its prompt cannot depend on the text."
    )
    return " ".join([compare(7), compare(0), first, lesson, end])


def draw(scores: Scores, controls: Mapping[str, float], file: Path) -> None:
    """Draw the scores over the layer where the prompt enters."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = sorted(LAYERS)
    figure, ax = plt.subplots(figsize=(4.5, 3.2), layout="constrained")
    for method, color, offset in (("lpt", "#a3479b", -14), ("lpt-npg", "#1f6fb2", 8)):
        values = [scores[method, layer] for layer in layers]
        ax.plot(layers, values, "o-", color=color, lw=2)
        ax.annotate(
            NAMES[method],
            (layers[1], values[1]),
            (0, offset),
            textcoords="offset points",
            color=color,
        )
    best = max(controls, key=lambda name: controls[name])
    ax.axhline(controls[best], color="#52606d", ls=":", lw=1.2)
    ax.text(0, controls[best] + 1.5, f"{CONTROLS[best]}, no prompt", color="#52606d", fontsize=9)
    ax.set(
        xlabel="layer before which the prompt enters (of 8)",
        ylabel="accuracy in %",
        ylim=(0, 104),
        xticks=layers,
        title="Who reads the text?",
    )
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Train eight small models, and print their table, a sentence and the file of the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps of each prompt")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="output folder")
    args = parser.parse_args()
    args.task, args.backbone, args.measure = "questions", "tiny", False
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    print(f"task questions, model tiny (8 frozen layers), {args.steps} steps, one seed\n")
    print(HEADER)
    runs: dict[Any, Any] = {}
    scores: dict[Any, float] = {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for layer in LAYERS:
            for method, lr in LEARNING_RATES.items():
                runs[method, layer] = pool.submit(crossing.run, args, method, layer, lr, 0, False)
        for method in CONTROLS:
            runs[method] = pool.submit(train_control, args, method)
        for key, run in runs.items():
            scores[key] = run.result()["score"]
            print(
                f"{format_row(key, scores[key]):48} [{time.monotonic() - start:.0f} s]", flush=True
            )
    controls = {name: scores.pop(name) for name in CONTROLS}
    picture = args.out / "who_reads.png"
    draw(scores, controls, picture)
    print(f"\n{textwrap.fill(describe(scores, controls), 90)}\n\nwritten: {picture}")


def format_row(key: Any, score: float) -> str:
    """Return the row of a run: of a control, or of a method and a layer."""
    if key in CONTROLS:
        return f"{score:7.1f}   {CONTROLS[key]:17} no prompt"
    return f"{score:7.1f}   {NAMES[key[0]]:17} {N_LAYERS - key[1]}"


def print_stored(folder: Path | str) -> None:
    """Print the table and the sentences of a run that is stored in a folder."""
    records = read_records(Path(folder) / "questions-tiny-300.jsonl")
    stored = {(r["method"], r["layer"]): r["score"] for r in records}
    scores = {(method, layer): stored[method, layer] for layer in LAYERS for method in NAMES}
    records = read_records(Path(folder) / "controls.jsonl")
    controls = {r["method"]: r["score"] for r in records}
    print(HEADER)
    for key, score in {**scores, **controls}.items():
        print(format_row(key, score))
    print(f"\n{textwrap.fill(describe(scores, controls), 90)}")


if __name__ == "__main__":
    main()
