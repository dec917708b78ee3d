"""Splits in folders and on the hub: files, columns, labels, sizes and messages."""

import json
import lzma
from dataclasses import replace

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from small import YES_NO, YES_NO_ROWS, write_splits
from superglue import BENCHMARKS, generate_lines, hidden, unlabelled

from idp_tutorial.data.rows import group_by_question
from idp_tutorial.data.splits import load_splits_from_hub, make_splits
from idp_tutorial.data.tasks import TASKS, load_task

# ---- folders


def test_a_frozen_few_shot_set_is_read_and_files_may_be_compressed(tmp_path):
    write_splits(tmp_path / "mine", train=YES_NO_ROWS)
    write_splits(tmp_path / "mine/k5", train=YES_NO_ROWS[:5], validation=YES_NO_ROWS[5:9])
    with lzma.open(tmp_path / "mine/test.jsonl.xz", "wt") as f:
        f.write("\n".join(json.dumps(r) for r in YES_NO_ROWS[:3]))
    for seed in (0, 1):
        assert load_task(YES_NO, tmp_path, shots=5, split_seed=seed).splits == dict(
            train=YES_NO_ROWS[:5], validation=YES_NO_ROWS[5:9], test=YES_NO_ROWS[:3]
        )
    assert load_task(YES_NO, tmp_path, shots=6).split_sizes() == dict(
        train=6, validation=54, test=3
    )
    (tmp_path / "mine/test.jsonl.xz").unlink()
    with pytest.raises(FileNotFoundError, match="mine has no test.jsonl or validation.jsonl"):
        load_task(YES_NO, tmp_path, shots=5)
    write_splits(tmp_path / "mine", test=YES_NO_ROWS[:3])
    (tmp_path / "mine/k5/validation.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="k5 has no validation.jsonl: add the file"):
        load_task(YES_NO, tmp_path, shots=5)


@pytest.mark.parametrize(
    "line,match",
    [
        ('{"sentence1": "a", "label": 0', r"train.jsonl, line 3 is not valid JSON"),
        ("[1, 2]", "line 3.*is not an object"),
        (
            '{"sentence1": "a"}',
            "line 3: no label among sentence1. Task 'mine' needs sentence1, label in every row",
        ),
        ('{"text": "a", "label": 0}', "line 3: no sentence1 among text, label"),
        ('{"sentence1": "a", "label": null}', "line 3: no label"),
        (
            '{"sentence1": "a", "label": 2}',
            r"line 3: label must be an index from 0 to 1 or a class name \(no, yes\) .* got 2",
        ),
        ('{"sentence1": "a", "label": -1}', "line 3: label must be .* got -1"),
        ('{"sentence1": "a", "label": "maybe"}', "line 3: label must be .* got 'maybe'"),
        ('{"sentence1": "a", "label": 0.5}', "line 3: label must be .* got 0.5"),
        ('{"sentence1": "a", "label": NaN}', "line 3: label must be .* got nan"),
        ('{"sentence1": "a", "label": [1]}', r"line 3: label must be .* got \[1\]"),
        ('{"sentence1": "  ", "label": 0}', "line 3: sentence1 must be a text that is not empty"),
        ('{"sentence1": 7, "label": 0}', "line 3: sentence1 must be .* got 7"),
        (
            '{"sentence1": "a", "sentence2": "b", "label": 0}',
            r"line 3: there is a sentence2, but .* pair=True",
        ),
        ("\xff".encode("latin1"), "line 3 is not a text in utf-8"),
    ],
)
def test_invalid_rows_are_reported_with_their_line(tmp_path, line, match):
    write_splits(tmp_path / "mine", test=YES_NO_ROWS)
    good = b'{"sentence1": "2020-01-01", "label": "yes"}\n\n'
    (tmp_path / "mine/train.jsonl").write_bytes(
        good * 1 + (line if isinstance(line, bytes) else line.encode())
    )
    with pytest.raises(ValueError, match=match):
        load_task(YES_NO, tmp_path)
    (tmp_path / "mine/train.jsonl").write_bytes(good * 9)
    # a date stays text, a name becomes its index
    assert load_task(YES_NO, tmp_path).splits["train"][0] == dict(sentence1="2020-01-01", label=1)


def test_missing_files_say_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere must be a folder .* contains mine/train"):
        load_task(YES_NO, tmp_path / "nowhere")
    write_splits(tmp_path / "other", train=YES_NO_ROWS)
    with pytest.raises(FileNotFoundError, match="it contains the folders other"):
        load_task(YES_NO, tmp_path)
    write_splits(tmp_path / "mine", train=YES_NO_ROWS)
    with pytest.raises(FileNotFoundError, match="mine has no test.jsonl or validation.jsonl: add"):
        load_task(YES_NO, tmp_path)
    write_splits(tmp_path / "qqp", validation=[dict(sentence1="a", sentence2="b", label=0)])
    for k in (100, 500):
        write_splits(tmp_path / f"qqp/k{k}", train=[], validation=[])
    for k in (None, 7):
        with pytest.raises(
            FileNotFoundError, match="qqp has no train.jsonl: .* shots=: k100, k500"
        ):
            load_task("qqp", tmp_path, shots=k)
    with pytest.raises(ValueError, match="train.jsonl has no rows"):
        load_task("qqp", tmp_path, shots=100)


def test_a_test_file_without_labels_is_ignored_with_a_warning(tmp_path):
    (tmp_path / "mine").mkdir()
    for split, label in (("train", 1), ("validation", 0), ("test", -1)):
        lines = [json.dumps(dict(sentence1=f"{split} {i}", label=label)) for i in range(20)]
        (tmp_path / "mine" / f"{split}.jsonl").write_text("\n".join(lines))
    with pytest.warns(
        UserWarning,
        match="test.jsonl has no labels and is ignored. Scores are reported on validation.jsonl",
    ):
        task = load_task(YES_NO, tmp_path)
    assert {r["sentence1"].split()[0] for r in task.splits["test"]} == {"validation"}


@pytest.mark.filterwarnings("ignore:.* has no labels and is ignored")
def test_files_may_have_the_columns_of_the_benchmark(tmp_path):
    write_splits(
        tmp_path / "sst2",
        train=[dict(idx=i, sentence=f"s{i}", label=i % 2) for i in range(20)],
        dev=[dict(idx=0, sentence="dev", label=1)],
        test=[dict(idx=0, sentence="secret", label=-1)],
    )
    write_splits(
        tmp_path / "qnli",
        train=[
            dict(question=f"q{i}", sentence=f"s{i}", label=("entailment", "not_entailment")[i % 2])
            for i in range(20)
        ],
        validation=[dict(question="q", sentence="s", label="entailment")],
    )
    assert load_task("sst2", tmp_path).splits["test"] == [dict(sentence1="dev", label=1)]
    assert load_task("qnli", tmp_path).splits["test"] == [
        dict(sentence1="q", sentence2="s", label=0)
    ]


def test_a_test_file_with_labels_is_the_test_split(tmp_path):
    write_splits(
        tmp_path / "cb",
        train=generate_lines("cb"),
        val=generate_lines("cb", 6, 1),
        test=generate_lines("cb", 9, 2),
    )
    assert load_task("cb", tmp_path).split_sizes() == dict(train=24, validation=6, test=9)
    (tmp_path / "cb/test.jsonl").write_text("")  # empty is a mistake, not a split without labels
    with pytest.raises(ValueError, match="test.jsonl has no rows"):
        load_task("cb", tmp_path)
    lines = generate_lines("cb", 9, 2)
    lines[4] = unlabelled(lines[4])
    write_splits(tmp_path / "cb", test=lines)  # so is one label that is missing
    with pytest.raises(ValueError, match="test.jsonl, line 5: .* of which 'label' is missing"):
        load_task("cb", tmp_path)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_in_the_schema_of_the_package_load_as_well(superglue_folder, tmp_path, name):
    task = load_task(name, superglue_folder)
    write_splits(tmp_path / name, **task.splits)
    assert load_task(name, tmp_path).splits == task.splits


def test_blank_lines_do_not_change_the_rows(tmp_path):
    records = [json.dumps(record) for record in generate_lines("copa", 4)]
    for folder, separator in (("a", "\n"), ("b", "\n\n")):
        (tmp_path / folder / "copa").mkdir(parents=True)
        for split in ("train", "validation"):
            (tmp_path / folder / f"copa/{split}.jsonl").write_text(separator.join(records))
    assert load_task("copa", tmp_path / "a").splits == load_task("copa", tmp_path / "b").splits


def test_two_files_of_one_split_of_a_task_are_refused(tmp_path):
    write_splits(tmp_path / "mine", train=YES_NO_ROWS, dev=YES_NO_ROWS, validation=YES_NO_ROWS)
    with pytest.raises(
        ValueError, match="several tables for the split 'validation' .dev.jsonl, validation.jsonl."
    ):
        load_task(YES_NO, tmp_path)


# ---- the hub, with small data sets of its shape


def load_from_hub(monkeypatch, name, **splits):
    seen = []

    def load_dataset(*a):
        seen.append(a)
        return DatasetDict({s: Dataset.from_list(r) for s, r in splits.items()})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return load_task(name), seen


def test_a_hub_test_split_without_labels_is_dropped(monkeypatch):
    rows = [dict(idx=i, sentence=f"s{i}", label=i % 2) for i in range(40)]
    t, seen = load_from_hub(
        monkeypatch,
        "sst2",
        train=rows,
        validation=[dict(idx=0, sentence="dev", label=1)] * 3,
        test=[dict(idx=0, sentence="secret", label=-1)] * 5,
    )
    assert seen == [("nyu-mll/glue", "sst2")] and t.split_sizes() == dict(
        train=36, validation=4, test=3
    )
    assert t.splits["test"][0] == dict(sentence1="dev", label=1)
    assert {r["sentence1"] for r in t.splits["validation"]} <= {r["sentence"] for r in rows}


def test_both_validation_splits_of_mnli_are_read(monkeypatch):
    def row(s, y=2):
        return dict(premise=s, hypothesis="h", label=y, idx=0)

    t, _ = load_from_hub(
        monkeypatch,
        "mnli",
        train=[row(str(i), i % 3) for i in range(30)],
        validation_matched=[row("bottleneck")],
        validation_mismatched=[row("mm")],
        test_matched=[row("x", -1)],
    )
    assert [r["sentence1"] for r in t.splits["test"]] == ["bottleneck", "mm"]
    assert t.splits["test"][0] == dict(sentence1="bottleneck", sentence2="h", label=2)


def test_hub_columns_are_put_together(monkeypatch):
    rows = [
        dict(question=f"is {i} odd", passage="A number.", label=bool(i % 2), idx=i)
        for i in range(20)
    ]
    t, seen = load_from_hub(
        monkeypatch, "boolq", train=rows, validation=rows[:1], test=[{**rows[0], "label": -1}]
    )
    # more of SuperGLUE in test_superglue.py
    assert seen == [("aps/super_glue", "boolq")]
    assert t.splits["test"] == [dict(sentence1="is 0 odd", sentence2="A number.", label=0)]
    both = replace(YES_NO, hub_dataset=("x/both",), columns=("{who}: {text}", None, "label"))
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *a: DatasetDict(
            {
                s: Dataset.from_list([dict(who="Ann", text="so", label=1)] * 9)
                for s in ("train", "test")
            }
        ),
    )
    assert load_task(both).splits["test"][0] == dict(sentence1="Ann: so", label=1)


def test_label_values_of_the_hub_are_mapped(monkeypatch):
    # the hub's indices are the other way round
    rows = [
        dict(text=f"t{i}", label=i % 2, label_text=("objective", "subjective")[i % 2])
        for i in range(20)
    ]
    t, _ = load_from_hub(monkeypatch, "subj", train=rows, test=rows)
    assert t.splits["test"][0] == dict(sentence1="t0", label=1) and t.labels[1] == "objective"
    names = ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")
    rows = [dict(text="Q ?", label=40, label_coarse=0, label_coarse_original=n) for n in names] * 5
    assert [
        r["label"]
        for r in load_from_hub(monkeypatch, "trec", train=rows, test=rows)[0].splits["test"][:6]
    ] == [*range(6)]
    with pytest.raises(ValueError, match=r"SetFit/TREC-QC train, row 0: label must be .* got 'X'"):
        load_from_hub(monkeypatch, "trec", train=[dict(text="Q ?", label_coarse_original="X")])


def test_regressions_class_labels_and_other_splits_of_the_hub_are_read(monkeypatch):
    def row(y):
        return dict(sentence1="a", sentence2="b", label=y, idx=0)

    t, _ = load_from_hub(
        monkeypatch,
        "stsb",
        train=[row(i / 10) for i in range(50)],
        validation=[row(5.0)],
        test=[row(-1.0)],
    )
    assert t.split_sizes() == dict(train=45, validation=5, test=1) and isinstance(
        t.splits["test"][0]["label"], float
    )
    imdb = Dataset.from_list([dict(text=f"t{i}", label=i % 2) for i in range(20)]).cast_column(
        "label", ClassLabel(names=["neg", "pos"])
    )
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a: DatasetDict(train=imdb, test=imdb, unsupervised=imdb)
    )
    assert set(load_splits_from_hub(TASKS["imdb"])) == {"train", "test"}


def test_hub_failures_say_what_to_do(monkeypatch):
    def offline(*a):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    message = (
        r"cannot load nyu-mll/glue/rte from the Hugging Face hub \(ConnectionError\): connect to "
        "the internet, pass data=DIR, the folder that contains rte/train.jsonl, or use a bundled"
    )
    with pytest.raises(ValueError, match=message):
        load_task("rte")
    with pytest.raises(ValueError, match="task 'mine' is not on the hub: pass data=DIR"):
        load_task(YES_NO)
    with pytest.raises(
        ValueError,
        match="nyu-mll/glue/rte train, row 0: no sentence2 among sentence1, label. Task 'rte' "
        ".* or the columns of the benchmark, of which 'sentence2' is missing",
    ):
        load_from_hub(monkeypatch, "rte", train=[dict(sentence1="a", label=0)])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_archive_and_the_hub_hold_the_same_task(superglue_folder, monkeypatch, name):
    archived = load_task(name, superglue_folder)
    online, seen = load_from_hub(
        monkeypatch,
        name,
        train=generate_lines(name, 30, 0, True),
        validation=generate_lines(name, 12, 1, True),
        test=hidden(generate_lines(name, 6, 2, True)),
    )
    assert seen == [("aps/super_glue", name)] and archived.split_sizes() == online.split_sizes()

    def key(r):
        return (r["sentence1"], r["sentence2"], r["label"])

    def count(rows):
        return sorted(len(q) for q in group_by_question(rows))

    assert sorted(map(key, archived.splits["test"])) == sorted(map(key, online.splits["test"]))
    assert count(archived.splits["test"]) == count(online.splits["test"])

    def texts(s):
        return {(r["sentence1"], r["sentence2"]) for r in archived.splits[s]}

    assert {r["label"] for r in archived.splits["train"]} == set(range(len(archived.labels)))
    assert texts("train").isdisjoint(texts("validation")) and texts("train").isdisjoint(
        texts("test")
    )


def test_invalid_rows_of_the_hub_are_reported(monkeypatch):
    def serve(**splits):
        monkeypatch.setattr(
            "datasets.load_dataset",
            lambda *a: DatasetDict({s: Dataset.from_list(r) for s, r in splits.items()}),
        )

    lines = generate_lines("copa", 9, 0, True)
    serve(train=[{k: v for k, v in l.items() if k != "premise"} for l in lines], validation=lines)
    with pytest.raises(
        ValueError,
        match=r"aps/super_glue/copa train, row 0: no sentence1 .* among .* columns of the "
        r"benchmark, of which 'premise' is missing",
    ):
        load_task("copa")
    serve(train=[{**l, "label": 3} for l in lines], validation=lines)
    with pytest.raises(ValueError, match="copa train, row 0: in COPA, .* label 0 .* got .* and 3"):
        load_task("copa")


# ---- splits of a run


def test_the_number_of_held_out_rows_depends_on_the_task():
    rows = [dict(sentence1=str(i), label=i % 2) for i in range(8000)]
    for name, n in (("subj", 1000), ("sst2", 800)):
        assert (
            len(make_splits(TASKS[name], dict(train=rows, test=YES_NO_ROWS), None, 0)["validation"])
            == n
        )
    # a small file
    assert (
        len(
            make_splits(TASKS["subj"], dict(train=rows[:100], test=YES_NO_ROWS), None, 0)[
                "validation"
            ]
        )
        == 20
    )
    assert (
        len(make_splits(YES_NO, dict(train=rows[:2], test=YES_NO_ROWS), None, 0)["validation"]) == 1
    )
