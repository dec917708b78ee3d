"""Two processes of one command in one folder: the second waits or is refused, and nothing is lost.

The first process is paused at a random file operation, and the second one is started; then the
command runs once more. It must succeed, and no record may be in a file twice.
"""

import json
import random
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from harness import Faults, end, operations, pair, start

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records
from results import find_command

SMALL = ["--steps=2", "--batch_size=4", "--device=cpu", "--max_len=32"]
ONE = [*SMALL, "--evaluations=1"]


@cache
def place():
    """Return a folder of tasks and text, and the folder of a small backbone."""
    from descriptions import small_backbone
    from test_random_input import furnished

    where = Path(tempfile.mkdtemp())
    return furnished(where, small_backbone())


def arguments(name, folder):
    """Return the arguments of a command whose files are in a folder."""
    where, backbone = place()
    data = [f"--data={where}", f"--backbone={backbone}"]
    out = f"--out={folder}"
    if name == "train":
        return ["--task=sst2", "--method=lpt", *data, *ONE, out]
    if name == "compare":
        return ["--task=sst2", "--methods=head-only,lpt", "--seeds=1", *data, *ONE, out]
    if name == "sweep":
        return ["--task=sst2", "--layers=0,1", "--methods=lpt", "--seeds=1", *data, *ONE, out]
    if name == "transfer":
        options = ["--source=sst2", "--target=mr", "--methods=lpt", "--seeds=1"]
        return [*options, "--target_shots=4", *data, *SMALL, out]
    if name == "pretrain":
        options = [
            "--teacher=",
            "--d=32",
            "--n_layers=1",
            "--steps=2",
            "--tokens_per_step=64",
            "--every=1",
        ]
        return [str(where / "long.txt"), *options, out]
    if name == "supplement":
        options = ["--epochs=0.2", "--batch_size=4", "--max_len=32", "--device=cpu"]
        return ["--task=sst2", "--method=prompt-tuning", *data, *options, out]
    if name == "predict":
        answers = f"--out={folder / 'answers.jsonl'}"
        return [
            f"--texts={where / 'text.txt'}",
            f"--model={model()}",
            f"--backbone={backbone}",
            answers,
        ]
    if name == "reproduce":
        options = [
            "--table=idpg-1",
            "--scale=full",  # the small one draws more rows than there are
            "--methods=prompt-tuning",
            "--tasks=sst2",
            "--seeds=1",
            "--steps=2",
        ]
        return [*options, *data, "--learning_rates=0.01", out]
    options = ["--methods=head-only,lpt", "--repeats=1", "--length=8", "--batch_size=2"]
    return [*options, "--device=cpu", f"--backbone={backbone}", f"--out={folder / 'bench.jsonl'}"]


NAMES = (
    *("train", "predict", "compare", "sweep", "transfer", "pretrain", "supplement", "reproduce"),
    "bench",
)


@cache
def model():
    """Return the folder of a trained model."""
    folder = Path(tempfile.mkdtemp()) / "model"
    find_command("train").main(arguments("train", folder))
    return folder


def run(name, folder):
    """Run a command in this process; an error of one line is a `UserError`."""
    if name in ("predict", "bench"):
        folder.mkdir(exist_ok=True)
    try:
        find_command(name).main(arguments(name, folder))
    except SystemExit as e:
        if e.code == 2:
            raise UserError(f"{name} was refused") from None
        assert not e.code, e.code


def check_files(folder):
    """Check that every file of records can be read, and has no record twice."""
    for file in folder.rglob("*.jsonl"):
        lines = [l for l in file.read_text(encoding="utf-8").splitlines() if l]
        records = [json.loads(l) for l in lines] if "answers" in file.name else read_records(file)
        keys = [
            json.dumps([r.get(k) for k in ("method", "seed", "setting", "layer", "lr", "step")])
            for r in records
            if "method" in r and "seed" in r
        ]
        assert len(keys) == len(set(keys)), f"{file.name} has a record twice"
    assert not [p for p in folder.rglob("*.part")], "a part file"


def at_once(name, each=1, seed=0):
    """Run two processes of a command in one folder; return the outcomes."""
    seen = Counter()
    bad = []
    rng = random.Random(f"{seed}{name}")
    if name == "predict":
        model()
    if name == "pretrain":
        (place()[0] / "long.txt").write_text("a line of text about tea and rain\n" * 25_000)
    with tempfile.TemporaryDirectory() as tmp:
        n = operations(lambda folder: run(name, folder), Path(tmp) / "out")
    for _ in range(each):
        with tempfile.TemporaryDirectory() as tmp:
            folder = Path(tmp) / "out"
            operation = rng.randint(1, n)
            codes = pair(lambda folder: run(name, folder), folder, operation)
            again = end(start(lambda folder: run(name, folder), folder, Faults(folder)))
            second = {0: "waited, or was first", 2: "was refused"}.get(max(codes), "broke")
            outcome, message = "equal", ""
            try:
                check_files(folder)
            except Exception as e:
                outcome, message = "damaged", f"{type(e).__name__}: {e}"
            # paused before it has the lock, the first process may be the one that is refused
            if sorted(codes) not in ([0, 0], [0, 2]) or again != 0:
                outcome = "failed"
        seen[f"second {second}", outcome] += 1
        if outcome != "equal":
            bad.append((name, operation, codes, again, outcome, message[:200]))
    return seen, bad
