"""`idp compare` on the command line: an error as one line and status 2, or three files."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from idp_tutorial.cli.compare import Progress, compare_command
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs import compare as comparison
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.process import handle_messages
from idp_tutorial.utils.records import read_records


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Return a function that runs a command: exit status, stdout and stderr."""

    def call(*argv, cwd=tmp_path):
        monkeypatch.chdir(cwd)
        code = 0
        try:
            compare_command.main([*map(str, argv)])
        except SystemExit as e:
            code = e.code or 0
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(command, tmp_path):
    """Check for exit status 2, one line on stderr with these words, and nothing else written."""

    def check(*words, args, cwd=None):
        before = sorted(tmp_path.rglob("*"))
        argv = [*args] if "--out" in args else [*args, "--out", tmp_path / "new" / "out"]
        code, out, err = command(*argv, cwd=cwd or tmp_path)
        assert (
            (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("idp compare: ")
        ), (code, out, err)
        assert all(w in err for w in words), err
        assert sorted(tmp_path.rglob("*")) == before

    return check


FAST = (
    "--methods",
    "head-only,lpt",
    "--steps",
    "2",
    "--seeds",
    "1",
    "--shots",
    "24",
    "--device",
    "cpu",
)

BAD = dict(
    task=(
        ["--task", "sentimnt"],
        ["unknown task 'sentimnt'", "did you mean 'sentiment'?", "Known: sst2"],
    ),
    method=(["--methods", "lpt,lpt_npg"], ["unknown method 'lpt_npg'", "did you mean 'lpt-npg'?"]),
    no_method=(["--methods", ","], ["unknown method ''", "Known: head-only"]),
    backbone=(["--backbone", "tinny"], ["no backbone 'tinny'", "Did you mean 'tiny'?"]),
    head=(["--head", "verbalisr"], ["head must be ", "got 'verbalisr'", "'verbalizer'"]),
    pooling=(["--pooling", "means"], ["pooling must be ", "got 'means'", "'mean'"]),
    no_words=(
        ["--head", "verbalizer", "--task", "similarity"],
        ["'similarity' has no label words", "classification head"],
    ),
    device=(["--device", "gpu"], ["device must be ", "got 'gpu'", "'auto' or 'cpu'"]),
    seeds=(["--seeds", "0"], ["seeds must be at least 1", "got 0"]),
    negative_seeds=(["--seeds", "-1"], ["seeds must be at least 1", "got -1"]),
    steps=(["--steps", "0"], ["steps must be at least 1, got 0"]),
    batch=(["--batch_size", "0"], ["batch_size must be at least 1, got 0"]),
    batch_with_a_hyphen=(["--batch-size=0"], ["batch_size must be at least 1, got 0"]),
    lr=(["--lr", "0"], ["lr must be a positive number, got 0"]),
    negative_lr=(["--lr", "-0.1"], ["lr must be a positive number, got -0.1"]),
    shots=(["--shots", "0"], ["shots must be at least 1, got 0"]),
    large_k=(["--shots", "9999"], ["shots must be between 1 and", "got 9999"]),
    prompt_length=(["--prompt_length", "0", "--methods", "lpt"], ["must be at least 1, got 0"]),
    long_prompt=(
        ["--prompt_length", "300", "--methods", "lpt,prompt-tuning"],
        ["prompt", "300", "256"],
    ),
    prompt_and_text=(
        ["--prompt_length", "240", "--methods", "lpt,prompt-tuning"],
        ["prompt", "240", "256"],
    ),
    layer=(["--layer", "8"], ["layer, the number of layers", "between 0 and 7", "got 8"]),
    negative_layer=(["--layer", "-1"], ["layer, the number", "between 0 and 7", "got -1"]),
    no_room=(["--max_len", "1"], ["--max_len 1", "room"]),
    no_data=(["--data", "nowhere", "--task", "trec"], ["nowhere", "train.jsonl"]),
    no_hub=(["--task", "sst2"], ["nyu-mll/glue", "--data DIR", "bundled"]),
    other_backbone=(["--backbone", "roberta-large"], ["no backbone 'roberta-large'", "hub"]),
)


@pytest.mark.parametrize("args,words", BAD.values(), ids=BAD)
def test_bad_arguments(args, words, refused):
    refused(*words, args=[*FAST, "--methods", "lpt", *args])  # what comes last counts


@pytest.mark.parametrize(
    "args,word",
    [
        (["--steps", "ten"], "--steps ten: give a whole number"),
        (["--seeds", "1.5"], "--seeds 1.5: give a whole number"),
        (["--lr", "fast"], "--lr fast: give a number"),
        (["--stepz", "3"], "unknown option 'stepz': did you mean 'steps'?"),
    ],
)
def test_what_does_not_parse(args, word, command, tmp_path):
    code, out, err = command(*args, "--out", tmp_path / "out")
    assert (
        code == 2
        and out == ""
        and word in err
        and "Traceback" not in err
        and not any(tmp_path.iterdir())
    )


GOOD = '{"sentence1": "a dull film", "label": 0}\n{"sentence1": "a fine film", "label": 1}\n' * 6
FILES = dict(
    not_json=(
        GOOD + '{"sentence1": ',
        ["train.jsonl, line 13 is not valid JSON", "must be an object"],
    ),
    a_list=(GOOD + "[1]\n", ["line 13", "is not an object"]),
    no_label=(GOOD + '{"sentence1": "hm"}\n', ["line 13", "no label", "sentence1, label"]),
    no_sentence=(
        GOOD + '{"txt": "hm", "label": 1}\n',
        ["line 13", "no sentence1", "or the columns of the benchmark"],
    ),
    label=(
        GOOD + '{"sentence1": "hm", "label": 2}\n',
        ["line 13", "label must be", "0 to 1", "got 2"],
    ),
    label_name=(
        GOOD + '{"sentence1": "hm", "label": "meh"}\n',
        ["line 13", "'meh'", "negative, positive"],
    ),
    empty_text=(GOOD + '{"sentence1": "  ", "label": 1}\n', ["line 13", "not empty"]),
    number=(
        GOOD + '{"sentence1": 7, "label": 1}\n',
        ["line 13", "sentence1 must be a text", "got 7"],
    ),
    empty_file=("", ["train.jsonl has no rows"]),
)


@pytest.mark.parametrize("text,words", FILES.values(), ids=FILES)
def test_bad_files(text, words, refused, tmp_path):
    folder = tmp_path / "data" / "mr"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(text)
    (folder / "test.jsonl").write_text(GOOD)
    refused(*words, args=["--data", tmp_path / "data", "--task", "mr", *FAST[:-4]])


def test_a_text_that_is_not_utf8(refused, tmp_path):
    folder = tmp_path / "data" / "mr"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(GOOD.encode() + b"\xff\xfe\n")
    (folder / "test.jsonl").write_text(GOOD)
    refused("line 13", args=["--data", tmp_path / "data", "--task", "mr"])


def test_an_out_that_is_or_lies_in_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused("is a file: give a folder", args=[*FAST, "--out", tmp_path / "file"])
    refused("is a file: give a folder", args=[*FAST, "--out", tmp_path / "file" / "deeper"])
    assert (tmp_path / "file").read_text() == "mine"


def test_earlier_results_stay_when_a_command_is_refused(refused, tmp_path):
    for name in ("compare.jsonl", "compare.jsonl.part"):
        (tmp_path / name).write_text("before\n")
    refused("unknown task", args=["--task", "sentimnt", "--out", tmp_path])
    refused("seeds must be at least 1", args=["--seeds", "0", "--out", tmp_path])
    assert {p.read_text() for p in tmp_path.glob("[!.]*")} == {"before\n"}


@pytest.fixture
def few_options(small_sentiment):
    """Return the options of quick runs on a small `sentiment`."""
    return ["--data", small_sentiment, "--task", "sentiment", "--device", "cpu", "--batch_size", 8]


def three_files(out, methods, seeds):
    records = read_records(out / "compare.jsonl")
    table = pd.read_csv(out / "compare.csv")
    assert (
        sorted(p.name for p in out.glob("compare.*"))
        == ["compare.csv", "compare.jsonl", "compare.png"]
        and (out / "compare.png").read_bytes()[:4] == b"\x89PNG"
    )
    assert [(r["method"], r["seed"]) for r in records] == [
        (m, s) for m in methods for s in range(seeds)
    ]
    assert list(table.method) == list(methods) and (table.seeds == seeds).all()
    return records


def test_equal_commands_write_equal_numbers(command, small_folder, few_options, tmp_path):
    methods = ["s-idpg-phm", "lpt-npg", "fine-tuning"]
    records = []
    for out in (tmp_path / "a/b", tmp_path / "c"):
        code, printed, err = command(
            *("--backbone", small_folder, *few_options, "--methods", ",".join(methods)),
            *("--steps", 2, "--seeds", 1, "--prompt_length", 3, "--out", out),
        )
        assert code == 0 and "Traceback" not in err, err
        assert "best checkpoint on validation, reported on test" in printed
        assert all(m in printed for m in methods)
        records.append(three_files(out, methods, 1))
    for first, second in zip(*records, strict=True):
        assert first["steps"] == 2 and first["data"] == few_options[1].name
        assert first["split_sizes"]["test"] == 20 and first["lr_selection"] == "default"
        assert first.get("prompt_length", 3) == 3
        for r in (first, second):
            for name in ("provenance", "ms_per_step", "peak_memory_mb", "seconds"):
                r.pop(name)
            r.pop("tuning_seconds", None)
        assert first == second


def test_all_stands_for_every_method(command, monkeypatch):
    methods = []

    def compare_and_write(names, *rest):
        methods.extend(names)
        raise UserError("enough")

    monkeypatch.setattr(comparison, "compare_and_write", compare_and_write)
    assert command("--methods", "all")[0] == 2 and methods == [*METHODS]


def test_tuned_with_a_verbalizer_and_a_method_given_twice(
    command, small_folder, few_options, tmp_path
):
    code, _, err = command(
        "--backbone",
        small_folder,
        *few_options,
        "--steps",
        2,
        "--seeds",
        1,
        "--methods",
        "lpt, head-only,lpt",
        "--head",
        "verbalizer",
        "--tune",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    a, b = three_files(tmp_path, ["lpt", "head-only"], 1)
    assert (
        err.count("validation") == 6
        and "best of 3 on validation" in a["lr_selection"]
        and (a["head"], b["steps_done"], a["params"]["head"]) == ("verbalizer", 0, 0)
    )


def test_a_run_that_diverges(command, small_folder, few_options, tmp_path):
    code, out, err = command(
        "--backbone",
        small_folder,
        *few_options,
        "--methods",
        "fine-tuning",
        "--lr",
        "1e30",
        "--steps",
        12,
        "--out",
        tmp_path / "out",
    )
    assert (
        code == 2 and out == "" and "A lower lr usually fixes it" in err and "Traceback" not in err
    )
    records = read_records(tmp_path / "out" / "compare.jsonl.part")
    assert {r["status"] for r in records} == {"diverged"} and [
        p.name for p in (tmp_path / "out").glob("[!.]*")
    ] == ["compare.jsonl.part"]


def test_options_reach_the_runs(command, small_folder, few_options, tmp_path):
    code, _, err = command(
        "--backbone",
        small_folder,
        *few_options,
        "--methods",
        "lpt-npg,prompt-tuning",
        "--steps",
        2,
        "--prompt_length",
        3,
        "--head",
        "verbalizer",
        "--position",
        1,
        "--template",
        "paper",
        "--loss_vocab",
        "labels",
        "--dropout_below_prompt",
        "--clip",
        ".5",
        "--patience",
        3,
        "--out",
        tmp_path,
    )
    assert code == 0, err
    want = dict(
        template="paper",
        loss_vocab="labels",
        dropout_below_prompt=True,
        clip=0.5,
        patience=3,
    )
    assert [{k: r[k] for k in want} for r in read_records(tmp_path / "compare.jsonl")] == [want] * 2


@pytest.mark.parametrize(
    "args,words",
    [
        (
            ["--template", "paper"],
            "--template paper has no effect: it needs --head verbalizer",
        ),
        (["--methods", "lora", "--position", "1"], "--position 1 has no effect on lora"),
        (["--clip", "0"], "clip must be a positive number, got 0.0 (the largest gradient norm"),
        (["--methods", "majority", "--clip", "2"], "--clip 2.0 has no effect on majority"),
        (["--patience", "0"], "patience must be at least 1, got 0"),
    ],
    ids=str,
)
def test_options_that_nothing_reads(args, words, refused):
    refused(words, args=[*FAST, "--methods", "lpt", *args])


@pytest.mark.long
def test_an_interrupted_comparison_keeps_what_is_finished(
    command, small_folder, few_options, tmp_path
):
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    part = tmp_path / "compare.jsonl.part"
    part.write_text('{"of": "an earlier try"}\n')
    args = [
        "--backbone",
        small_folder,
        "--methods",
        "lpt",
        "--steps",
        "3",
        "--seeds",
        "99",
        *few_options,
        "--out",
        tmp_path,
    ]
    with subprocess.Popen(
        [*map(str, [sys.executable, "-m", "idp_tutorial", "compare", *args])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=tmp_path,
        # also where the tests run in the background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as p:
        end = time.time() + 300

        def finished():
            return part.exists() and part.read_text().count('"lpt"') >= 2

        while time.time() < end and p.poll() is None and not finished():
            time.sleep(0.1)
        while (
            p.poll() is None and time.time() < end
        ):  # a signal that comes while an object is finalised is lost
            p.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                p.wait(timeout=10)
        _, err = p.communicate(timeout=20)
    # Python itself reports the lost signal
    err = re.sub(r"Exception ignored in: .*?KeyboardInterrupt: ?\n", "", err, flags=re.S)
    assert p.returncode == 130 and "the finished runs are in" in err and "Traceback" not in err, err
    _, *records = read_records(part)  # the first is of another command
    assert (
        len(records) >= 2
        and [r["seed"] for r in records] == [*range(len(records))]
        and not (tmp_path / "compare.jsonl").exists()
    )
    args[args.index("99")] = str(len(records))
    # the same command goes on, and has nothing left to do
    code, _, err = command(*args)
    assert code == 0 and "seed" not in err, err
    assert read_records(tmp_path / "compare.jsonl") == records and not part.exists()


def test_help_names_every_option(command):
    code, out, _ = command("--help")
    assert code == 0 and all(
        f"--{o}" in out
        for o in [
            "task",
            "methods",
            "backbone",
            "data",
            "shots",
            "seeds",
            "steps",
            "batch_size",
            "max_len",
            "prompt_length",
            "layer",
            "head",
            "pooling",
            "lr",
            "tune",
            "tune_head_first",
            "precision",
            "cache",
            "standardise",
            "glove",
            "device",
            "out",
        ]
    )


@pytest.mark.long
@pytest.mark.parametrize("name,k", [("trec", 100), ("mr", 100)])
def test_real_tasks(name, k, command, data_dir, small_folder, tmp_path):
    if not (data_dir / name).is_dir():
        pytest.skip(f"no {name} in the folder of tasks")
    code, _, err = command(
        "--task",
        name,
        "--data",
        data_dir,
        "--shots",
        k,
        "--backbone",
        small_folder,
        "--methods",
        "lpt-npg",
        "--seeds",
        1,
        "--steps",
        3,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    (r,) = three_files(tmp_path, ["lpt-npg"], 1)
    assert r["task"] == name and r["shots"] == k and r["data"] == data_dir.name
    assert r["split_sizes"]["train"] == k and r["split_sizes"]["test"] >= 400


def test_stored_runs_count_as_done_and_not_for_the_time_left(capsys, monkeypatch):
    """A message of another kind that has the word seed is not a run."""
    progress = Progress(10)
    progress.start_time = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: 60.0)
    package_logger = logging.getLogger("idp_tutorial.runs.compare")
    with handle_messages(progress):
        for _ in range(4):
            package_logger.debug("lpt seed 0 stored", extra=dict(run_status="stored"))
        package_logger.info("the seed 0 of a search")
        for _ in range(2):
            package_logger.info("lpt seed 1", extra=dict(run_status="trained"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("[")[1] for line in lines] == [
        "4 of 10 runs, 60 s]",
        "5 of 10 runs, 60 s, about 300 s left]",
        "6 of 10 runs, 60 s, about 120 s left]",
    ]
