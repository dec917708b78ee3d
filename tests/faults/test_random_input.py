"""Random command lines and files of hypothesis: each is accepted, or refused with a message.

A traceback is a failure of the test.
"""

import io
import json
import math
import shutil
import string
import sys
import warnings
from collections import Counter
from dataclasses import MISSING

import pytest
from harness import REFUSALS
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from idp_tutorial.cli.compare import compare_command
from idp_tutorial.cli.params import params_command
from idp_tutorial.cli.predict import predict_command
from idp_tutorial.cli.train import train_command
from idp_tutorial.data.tasks import load_task
from idp_tutorial.utils.records import dump_record, load_record, read_existing_records, read_records
from idp_tutorial.utils.tensor_files import read_last_snapshot
from results.depth.sweep import sweep_command
from results.pretraining.corpus import read_lines
from results.pretraining.run import pretrain_command
from results.transfer.run import transfer_command

MANY = pytest.mark.slow
SEEN = Counter()  # outcomes of the cases
COMMANDS = [
    train_command,
    compare_command,
    sweep_command,
    transfer_command,
    params_command,
    predict_command,
    pretrain_command,
]
ODD = [
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "nan",
    "inf",
    "-inf",
    "1e-3",
    "1e400",
    "9" * 23,
    "0.5",
    "x",
    "é",
    "\udc80",
    "a\0b",
    "..",
    "/",
    "/dev/null",
    "all",
    "lpt",
    "lpt,head-only",
    ",",
    "no",
    "bf16",
    "fp16",
    "cpu",
    "auto",
    "cls",
    "verbalizer",
    "mean",
    "last",
    "paper",
    "{s1} {mask}",
    "{",
    "sentence",
    "hidden",
    "both",
    "none",
    "x" * 300,
    "=",
]


def limit_examples(n):
    return settings(
        max_examples=n, deadline=None, suppress_health_check=[*HealthCheck], derandomize=n < 500
    )


@pytest.fixture(scope="module")
def place(small_folder, tmp_path_factory):
    return furnished(tmp_path_factory.mktemp("place"), small_folder)


def furnished(where, small_folder):
    """Write a task of 40 rows and a text to pretrain on; return the folder and a small model."""
    for task in ("sst2", "mr"):
        (where / task).mkdir()
        for split, n in (("train", 24), ("validation", 8), ("test", 8)):
            rows = [
                dict(sentence1=f"{'good' if i % 2 else 'bad'} film {i}", label=i % 2)
                for i in range(n)
            ]
            (where / task / f"{split}.jsonl").write_text(
                "".join(json.dumps(r) + "\n" for r in rows)
            )
    (where / "text.txt").write_text("\n".join(f"a line of text number {i}" for i in range(50)))
    return where, small_folder


def start_of(f, where, model):
    """Return options that make a run small."""
    has = f.options()
    small = dict(
        task="sst2",
        source="sst2",
        target="mr",
        data=where,
        backbone=model,
        steps=1,
        evaluations=1,
        seeds=1,
        batch_size=4,
        device="cpu",
        methods="head-only,lpt",
        out=where / "out",
        layers="0",
        max_len=16,
        target_shots=4,
        test_rows=4,
        model=where,
        corpus_dir=where / "corpus",
        n_layers=1,
        d=32,
        teacher="",
    )
    skip = {"methods": f is params_command, "layers": f is not sweep_command}
    return {k: str(v) for k, v in small.items() if k in has and not skip.get(k)}


def argv_of(f, chosen, where, model):
    given = start_of(f, where, model) | chosen
    has = f.options()
    argv = [given.pop(k, str(where / "text.txt")) for k, o in has.items() if o.default is MISSING]
    for k, v in given.items():
        argv += [f"--{k}"] if has[k].kind is bool else [f"--{k}={v}"]
    return argv


def check_exit_status(f, argv):
    """Check that a command exits with status 0, or with status 2 and a message."""
    messages = io.StringIO()
    streams = (sys.stdout, sys.stderr, sys.stdin)
    sys.stdout = io.StringIO()
    sys.stderr = messages
    sys.stdin = io.StringIO("a text\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f.main(argv)
        SEEN["command line", "ran"] += 1
    except SystemExit as e:
        SEEN["command line", "was refused" if e.code else "ran"] += 1
        assert e.code in (0, 2, None), (argv, e.code)
        assert not e.code or messages.getvalue().strip(), argv
    finally:
        sys.stdout, sys.stderr, sys.stdin = streams


def lines_of(n, place, seed=0):
    where, model = place

    @seeded(seed)
    @limit_examples(n)
    @given(st.data())
    def check(data):
        f = data.draw(st.sampled_from(COMMANDS))
        names = st.sampled_from(
            [k for k in f.options() if k not in ("backbone", "data", "corpus_dir")]
        )
        big = st.one_of(st.sampled_from(ODD), st.integers().map(str), st.floats().map(str))
        chosen = data.draw(st.dictionaries(names, big, min_size=1, max_size=3))
        if "out" in chosen:
            chosen["out"] = f"{where}/{chosen['out']}"  # below the test's own folder
        if (
            chosen.get("steps", "1").lstrip("-").isdigit()
            and int(chosen.get("steps", "1") or 1) > 3
        ):
            chosen["steps"] = "2"  # more would be valid, and take hours
        for k in ("seeds", "repeats", "probe_steps", "n_layers", "d", "tokens"):
            if chosen.get(k, "").isdigit() and 3 < int(chosen[k]) < 10**7:
                chosen[k] = "2"
        shutil.rmtree(where / "out", ignore_errors=True)
        check_exit_status(f, argv_of(f, chosen, where, model))

    check()


def test_command_lines(place):
    lines_of(15, place)


@MANY
def test_many_command_lines(place):
    lines_of(1000, place)


# --- data

KEYS = st.sampled_from(["sentence1", "sentence2", "label", "a"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(KEYS, x, max_size=3)),
    max_leaves=6,
)
BITS = st.one_of(
    st.binary(max_size=80),
    st.text(max_size=40).map(lambda s: s.encode("utf-8", "surrogatepass")),
    VALUES.map(lambda v: json.dumps(v).encode()),
)


def read_or_refuse(f):
    try:
        f()
        return "was read"
    except REFUSALS as e:
        assert str(e)
        return "was refused"


def files_of(n, tmp_path, seed=0):
    @seeded(seed)
    @limit_examples(n)
    @given(st.lists(BITS, max_size=4), st.sampled_from([b"\n", b"\r\n", b"\0", b"\xef\xbb\xbf"]))
    def check(rows, between):
        data = between.join(rows)
        folder = tmp_path / "mr"
        folder.mkdir(exist_ok=True)
        for split in ("train", "validation", "test"):
            (folder / f"{split}.jsonl").write_bytes(data)
        SEEN["file of rows", read_or_refuse(lambda: load_task("mr", str(tmp_path)))] += 1
        for name in (
            "records.jsonl",
            "text.txt",
            "text.txt.xz",
            "rows.jsonl",
            "checkpoint-3.safetensors",
        ):
            (tmp_path / name).write_bytes(data)
        read_or_refuse(lambda: read_records(tmp_path / "records.jsonl"))
        read_or_refuse(lambda: read_existing_records(tmp_path / "records.jsonl"))
        read_or_refuse(lambda: read_last_snapshot(tmp_path))
        for name in ("text.txt", "rows.jsonl"):
            read_or_refuse(lambda name=name: list(read_lines(tmp_path / name)))

    check()


@pytest.mark.filterwarnings("ignore:.* has no labels and is ignored")
def test_files_of_anything(tmp_path):
    files_of(60, tmp_path)


@MANY
def test_many_files_of_anything(tmp_path):
    files_of(1000, tmp_path)


@limit_examples(100)
@given(
    st.dictionaries(
        st.text(string.ascii_letters, min_size=1, max_size=6).filter(lambda k: k != "digest"),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9)
        ),
        max_size=4,
    ),
    st.randoms(),
)
def test_a_damaged_record_is_refused(record, rng):
    line = dump_record(record)
    assert load_record(line) == record
    data = bytearray(line.encode())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    try:
        got = load_record(data.decode())
    except ValueError:
        return
    assert got == record or any(
        isinstance(v, float) and math.isclose(v, got.get(k, 0)) for k, v in record.items()
    )
