"""Estimators: labels of any kind, texts in any form, files, pickles, scikit-learn's checks."""

import pickle
import random
import subprocess
import sys
import warnings
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import validate_data
from small import stop_at

from idp_tutorial import PromptClassifier, PromptRegressor, estimator
from idp_tutorial.assembly.config import RunConfig, describe_all_options
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.user_data import hold_out_rows
from idp_tutorial.estimator import ESTIMATOR_OPTIONS, convert_to_rows
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import LatePromptConfig, register
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.utils.checks import UserError

TEXTS = [
    f"the {a} {b} is {c}"
    for a in ("red", "blue", "old")
    for b in ("door", "cup")
    for c in ("here", "gone", "small", "big")
]
LABELS = [("a", "b", "c")[i % 3] for i in range(len(TEXTS))]


@pytest.fixture(scope="module")
def quick(small_folder):
    """A function that returns an estimator of the smallest model with two training steps."""

    def make(method="lpt-npg", cls=PromptClassifier, **kw):
        defaults = dict(
            backbone=str(small_folder),
            steps=2,
            evaluations=1,
            lr=None,
            device="cpu",
            controls=False,  # after two training steps they are better
        )
        options = METHODS[method].options if method in METHODS else ()
        small = {k: v for k, v in dict(prompt_length=2, bottleneck=4).items() if k in options}
        return cls(method, **{**defaults, **small, **kw})

    return make


def test_importing_the_package_imports_neither_torch_nor_sklearn():
    code = """import idp_tutorial, sys
assert 'torch' not in sys.modules and 'sklearn' not in sys.modules
assert 'PromptClassifier' in dir(idp_tutorial)
try: idp_tutorial.PromptClasifier
except AttributeError: print('none')"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "none\n"
    )


def test_every_option_of_a_run_is_a_keyword():
    missing = {*describe_all_options()} - {*ESTIMATOR_OPTIONS}
    assert missing == {"task", "data", "shots", "split_seed", "eval_every"}
    clf = PromptClassifier("id-spam", layer=3)
    assert (
        clf.get_params() == {**ESTIMATOR_OPTIONS, "method": "id-spam", "layer": 3}
        and clone(clf.set_params(prompt_length=7)).prompt_length == 7
    )
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        PromptClassifier(layers=3)


@pytest.mark.parametrize(
    "labels,classes", [((0, 1.0), [0.0, 1.0]), ((True, 0), [0, 1]), ((2.0, 3, 2, 3.0), [2.0, 3.0])]
)
def test_equal_numbers_are_one_class(labels, classes, quick):
    y = [*labels] * (len(TEXTS) // len(labels))
    weights = {label: 2 for label in {*labels}}
    clf = quick(class_weight=weights).fit(TEXTS[: len(y)], y)
    assert clf.classes_.tolist() == classes and {*clf.predict(TEXTS)} <= {*classes}
    for kind in (int, float):  # of the labels of other texts
        assert clf.score(TEXTS[: len(y)], [*map(kind, y)]) == clf.score(TEXTS[: len(y)], y)
        clf.fit(TEXTS[: len(y)], y, validation=(TEXTS[:8], [*map(kind, y[:8])]))


@pytest.mark.parametrize("labels", [(True, False), (0.0, 2.0), ("10", "9", "8")], ids=str)
def test_predictions_are_the_labels_that_were_given(labels, quick, tmp_path):
    y = [labels[i % len(labels)] for i in range(len(TEXTS))]
    clf = quick().fit(TEXTS, y)
    assert clf.classes_.tolist() == sorted(set(y)) and set(clf.predict(TEXTS).tolist()) <= set(y)
    p = clf.predict_proba(TEXTS)
    assert (
        p.shape == (len(TEXTS), len(labels))
        and np.allclose(p.sum(1), 1)
        and 0 <= clf.score(TEXTS, y) <= 1
    )
    clf.save_pretrained(tmp_path / "model")
    again = PromptClassifier.from_pretrained(tmp_path / "model")
    assert (
        again.classes_.dtype.kind == clf.classes_.dtype.kind
        and (again.predict(TEXTS) == clf.predict(TEXTS)).all()
    )
    # a saved model has the options of its run, and `controls` is one of `fit`
    assert again.get_params() == {**clf.get_params(), "lr": clf.config_.lr, "controls": True}
    with pytest.raises(ValueError, match="load it with PromptClassifier"):
        PromptRegressor.from_pretrained(tmp_path / "model")


def test_other_columns_of_a_table_are_ignored_beside_one_with_a_usual_name(quick):
    authors = ["me"] * len(TEXTS)
    columns = dict(author=authors, n=[*range(len(TEXTS))], label=LABELS)
    for name in ("text", "sentence"):
        frame = pd.DataFrame({**columns, name: TEXTS})
        for table in (frame, Dataset.from_pandas(frame), frame.to_dict("records")):
            assert convert_to_rows(table) == [dict(sentence1=text) for text in TEXTS]
    pairs = pd.DataFrame({"text2": authors, "text": TEXTS, "n": LABELS})
    clf = quick().fit(pairs, LABELS)
    assert clf.task_.pair
    same = clf.predict_proba(pairs) == clf.predict_proba([*zip(TEXTS, authors)])
    assert same.all()
    with pytest.raises(
        ValueError, match=r"24 of 24 rows .* row 0: n must be a text that is not empty, got 0"
    ):
        quick().fit(pd.DataFrame(dict(message=TEXTS, n=columns["n"])), LABELS)


def test_fit_leaves_the_random_numbers_of_the_process_as_they_were(quick):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    quick().fit(TEXTS, LABELS)
    assert draw() == expected


def test_labels_that_are_no_texts_or_numbers_are_refused(quick):
    for label in (Decimal(1), pd.Timestamp(2026, 1, 1)):
        with pytest.raises(UserError, match="label 0 must be a text, a number or a Boolean, got"):
            quick().fit(TEXTS, [label] * len(TEXTS))


def test_a_saved_estimator_can_predict_in_bfloat16(quick, tmp_path):
    clf = quick().fit(TEXTS, LABELS)
    clf.save_pretrained(tmp_path)
    again = PromptClassifier.from_pretrained(tmp_path, dtype="bfloat16")
    assert str(again.model_.backbone.word_embeddings.weight.dtype) == "torch.bfloat16"
    assert again.get_params()["dtype"] == "bfloat16"
    exact = clf.predict_proba(TEXTS)
    copies = [again.predict_proba(TEXTS), pickle.loads(pickle.dumps(again)).predict_proba(TEXTS)]
    assert np.allclose(*copies) and not np.allclose(copies[0], exact, rtol=0, atol=1e-9)
    assert np.allclose(copies[0], exact, atol=0.05)


def test_texts_in_any_shape(quick):
    pairs = [(t, t[::-1]) for t in TEXTS]
    frame = pd.DataFrame(dict(text=TEXTS, label=LABELS))
    shapes = [
        frame["text"],
        frame[["text"]],
        np.array(TEXTS, object),
        pd.DataFrame(dict(n=LABELS, sentence1=TEXTS)),
        Dataset.from_dict(dict(sentence1=TEXTS, n=[*range(len(TEXTS))])),
        Dataset.from_pandas(frame),  # its labels are not read as second texts
    ]
    for X in shapes:
        assert convert_to_rows(X) == [dict(sentence1=text) for text in TEXTS]
    want = quick().fit(frame["text"], frame["label"]).predict_proba(TEXTS)
    assert (quick().fit(shapes[-1]).predict_proba(shapes[-1]) == want).all()
    clf = quick().fit(pairs, LABELS)
    assert (
        clf.task_.pair and clf.predict(pd.DataFrame(pairs)).tolist() == clf.predict(pairs).tolist()
    )
    turned = pd.DataFrame(pairs, columns=["sentence1", "sentence2"])[["sentence2", "sentence1"]]
    assert convert_to_rows(turned) == convert_to_rows(pairs)  # columns are read by name
    with pytest.raises(ValueError, match="X has single texts, but .* fitted on pairs of texts"):
        clf.predict(TEXTS)
    with pytest.raises(ValueError, match="one set contains pairs"):
        quick().fit(TEXTS, LABELS, (pairs, LABELS))


@pytest.mark.parametrize(
    "X,y,words",
    [
        (TEXTS, None, "requires y to be passed, but the target y is None"),
        (TEXTS, [["a"] * 2] * 24, "only the class 'a'"),
        (TEXTS, [["a"], [1, 2]] * 12, "label 1: the label is 1, but that of label 0 is 'a'"),
        (
            TEXTS,
            [["a", None], ["b"]] * 12,
            "label 0 must be a text, a number or a Boolean, got None",
        ),
        (TEXTS, LABELS[:3], "24 texts and y has 3 labels"),
        (TEXTS, ["a"] * 24, "only the class 'a'"),
        (TEXTS, [None, *LABELS[1:]], "label 0 must be a text, .* got None"),
        (TEXTS, [pd.NA, *LABELS[1:]], "label 0 must be a text, .* got <NA>"),
        (
            ["a", None],
            ["a", "b"],
            r"1 of 2 rows has no text in X \(row 1\): write the texts or remove .*skip_empty",
        ),
        (["a", "b \ud800"], ["a", "b"], "row 1: .* contains a lone surrogate"),
        (["a", "b \0"], ["a", "b"], "row 1: .* contains a NUL character"),
        (["a", " ", float("nan"), pd.NA], [*"abab"], r"3 of 4 .*row 1, row 2, row 3\)"),
        ({*TEXTS}, LABELS, "X must be an ordered collection, got set: give a list"),
        (
            frozenset(TEXTS),
            LABELS,
            "X must be an ordered collection, got frozenset: give a list",
        ),
        (TEXTS, {*range(24)}, "y must be an ordered collection, got set: give a list"),
        (
            ["a", "b"],
            "ab",
            "y must be an ordered collection, got str: give a list",
        ),
        (
            ["a", "b"],
            dict(a=1, b=2),
            "y must be an ordered collection, got dict: give a list",
        ),
        (["a", "b"], ["a", " "], "label 1 must be a text, .* got ' '"),
        (["a", "b"], ["a", "b\udfff"], "label 1 contains a lone surrogate"),
        ("text", ["a"], "X must be an ordered collection, got str: give a list"),
        ([], [], "0 sample"),
        (["a", "b"], ["a", "b"], "no row can be held out from 2 rows"),
    ],
    ids=lambda v: "",
)
def test_texts_and_labels_that_cannot_be_fitted_are_refused(X, y, words, quick):
    with pytest.raises(ValueError, match=words):
        quick().fit(X, y)


def test_fit_refuses_bad_validation(quick):
    for y, validation, words in (
        (LABELS, None, "validation must be a fraction.*got None"),
        (LABELS, "a", "These texts select the checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            quick().fit(TEXTS, y, validation)


@pytest.mark.parametrize(
    "option,value",
    [
        ("steps", "a"),
        ("steps", None),
        ("steps", 2.5),
        ("steps", 0),
        ("evaluations", "a"),
        ("evaluations", -1),
        ("evaluations", None),
        ("clip", "x"),
        ("warmup", "x"),
        ("backbone", None),
        ("backbone", 3),
    ],
)
def test_an_option_with_a_bad_value_is_refused_by_name(option, value, quick):
    with pytest.raises(ValueError, match=f"^{option} must be .*got {value!r}"):
        quick("head-only", **{option: value}).fit(TEXTS, LABELS)


@pytest.mark.parametrize("cls", [PromptClassifier, PromptRegressor])
def test_an_estimator_that_is_not_fitted_cannot_predict(cls, quick):
    for name in ("predict", "predict_proba", "score", "save_pretrained"):
        if hasattr(cls, name):
            with pytest.raises(NotFittedError):
                getattr(quick(cls=cls), name)(TEXTS)


def test_held_out_rows_are_in_proportion_to_the_classes():
    rows = [dict(label="abc"[i % 3] if i < 93 else "rare") for i in range(96)]
    rest, drawn = hold_out_rows(rows, 0.2, 3)
    assert len(drawn) == 19 and len(rest) == 77 and sum(r["label"] == "rare" for r in rest) == 2
    assert hold_out_rows(rows, 0.2, 3) == (rest, drawn) != hold_out_rows(rows, 0.2, 4)


def labelled_dataset(texts=TEXTS):
    names = ["no", "yes", "perhaps"]
    features = Features(
        dict(topic=ClassLabel(names=names), n=Value("int64"), message=Value("string"))
    )
    rows = [dict(message=t, topic="abc".index(LABELS[i]), n=i) for i, t in enumerate(texts)]
    return Dataset.from_list(rows, features=features)


def test_columns_of_a_table_are_chosen_by_name(quick, tmp_path):
    data = labelled_dataset()
    columns = dict(text="message", label="topic")
    names = [["no", "yes", "perhaps"]["abc".index(label)] for label in LABELS]
    want = quick().fit(TEXTS, names).predict_proba(TEXTS)
    for X in (data.with_format("numpy"), DatasetDict(train=data, test=data)):
        clf = quick().fit(X, **columns)
        assert clf.classes_.tolist() == ["no", "perhaps", "yes"]
        assert (clf.predict_proba(data) == want).all() and (clf.predict_proba(TEXTS) == want).all()
    assert clf.score(data) == clf.score(data, names) == clf.score(TEXTS, names)
    clf.save_pretrained(tmp_path / "model")  # the columns are part of it
    again = PromptClassifier.from_pretrained(tmp_path / "model")
    assert (again.predict_proba(data.to_pandas()) == want).all()
    frame = pd.DataFrame(dict(n=range(24), message=TEXTS, topic=names))
    rows = frame.to_dict("records")
    assert (again.predict_proba(frame) == want).all() and (again.predict_proba(rows) == want).all()
    pairs = quick().fit(frame.assign(reply=TEXTS[::-1]), text2="reply", **columns)
    assert pairs.task_.pair and pairs.task_.columns == ("{message}", "{reply}", "topic")


def test_labels_of_a_data_set_are_named_where_a_text_has_several(quick):
    topics = List(ClassLabel(names=["no", "yes"]))
    features = Features(dict(text=Value("string"), label=topics))
    rows = [dict(text=text, label=[[0], [0, 1], []][i % 3]) for i, text in enumerate(TEXTS)]
    clf = quick().fit(Dataset.from_list(rows, features=features))
    assert clf.label_form_ == "lists" and clf.classes_.tolist() == ["no", "yes"]


def test_validation_can_be_a_table(quick):
    train, rest = labelled_dataset(TEXTS[:16]), labelled_dataset(TEXTS[:8])
    columns = dict(text="message", label="topic")
    want = quick().fit(train, validation=rest, **columns)
    splits = quick().fit(DatasetDict(train=train, dev=rest), **columns)
    assert want.log_.history == splits.log_.history
    assert want.record_["split_sizes"]["validation"] == 8


@pytest.mark.parametrize(
    "X,options,words",
    [
        (
            labelled_dataset(),
            dict(text="mesage"),
            "X: no column 'mesage' among message, topic, n",
        ),
        (labelled_dataset(), dict(text="message", label="x"), "X: no column 'x' .* in label="),
        (labelled_dataset(), dict(label="topic"), "no column 'text' among .* in text="),
        (labelled_dataset(), dict(text2="message"), "no column 'text' among .* in text="),
        (TEXTS, dict(text="message"), "X: no column 'message' among sentence1"),
        (DatasetDict(test=labelled_dataset()), {}, "has no training rows, only test"),
    ],
    ids=lambda v: "",
)
def test_columns_that_do_not_exist_are_refused(X, options, words, quick):
    with pytest.raises(ValueError, match=words):
        quick().fit(X, **options)


def test_empty_texts_are_left_out_on_request(quick, caplog):
    texts = [" ", *TEXTS, None]
    labels = ["a", *LABELS, "b"]
    clf = quick().fit(texts, labels, skip_empty=True)
    assert caplog.messages == ["skip_empty left out 2 of 26 rows (row 0, row 25)"]
    assert (clf.predict_proba(TEXTS) == quick().fit(TEXTS, LABELS).predict_proba(TEXTS)).all()
    with pytest.raises(ValueError, match=r"2 of 26 .*: write the texts or remove these rows"):
        clf.predict(texts)
    with pytest.raises(ValueError, match="X has no row with a text"):
        quick().fit(["", " "], ["a", "b"], skip_empty=True)


def test_the_share_of_cut_texts_is_an_attribute(quick):
    clf = quick(max_len=4).fit(TEXTS, LABELS, validation=(TEXTS, LABELS))
    assert clf.cut_share_ == 1 and clf.log_.cut_texts == 24
    clf = quick().fit(TEXTS, LABELS)
    assert clf.cut_share_ == 0


def test_a_class_has_one_weight(quick):
    with pytest.raises(
        ValueError, match="class_weight={1: 2.0, '1': 3.0} has two weights for one class"
    ):
        quick(class_weight={1: 2.0, "1": 3.0}).fit(TEXTS, [i % 2 for i in range(24)])


@pytest.mark.parametrize("label", ["1_0", "١٢", True, "x", " "])
def test_a_number_of_a_regression_is_written_as_in_a_table(label, quick):
    with pytest.raises(ValueError, match="label 1: "):
        quick(cls=PromptRegressor).fit(TEXTS, [0.5, label, *range(22)])


def test_separate_validation_texts(quick):
    clf = quick().fit(TEXTS[:12], LABELS[:12], validation=(TEXTS[12:], LABELS[12:]))
    assert (
        len(quick().fit(TEXTS, LABELS, np.float32(0.5)).predict(TEXTS)) == 24
    )  # a fraction of any numeric type
    assert clf.log_.validation == pytest.approx(100 * clf.score(TEXTS[12:], LABELS[12:]))
    with pytest.raises(
        ValueError, match="validation rows: label must be .* a class name .a, b, c. .* got 'z'"
    ):
        quick().fit(TEXTS, LABELS, validation=(["x"], ["z"]))


def test_training_stops_when_the_score_does_not_improve(quick):
    clf = quick(steps=40, evaluations=40, patience=2, lr=1e-9).fit(TEXTS, LABELS)
    assert clf.log_.steps == 3 and len(clf.log_.history) == 3


def test_the_record_has_the_steps_that_were_trained(quick):
    m = quick(steps=500, epochs=2, evaluations=4).fit(TEXTS, LABELS)
    assert m.config_.steps == m.record_["steps"] < 500 and m.config_.eval_every == 1


def test_balanced_class_weights_raise_a_rare_class(quick):
    y = ["rare" if i in (3, 8, 15, 20) else "common" for i in range(24)]
    plain, fair = (
        quick(steps=12, lr=1e-2, class_weight=w).fit(TEXTS, y).predict_proba(TEXTS)[:, 1].mean()
        for w in (None, "balanced")
    )
    assert fair > plain + 0.05
    explicit = (
        quick(steps=12, lr=1e-2, class_weight=dict(rare=5))
        .fit(TEXTS, y)
        .predict_proba(TEXTS)[:, 1]
        .mean()
    )
    assert explicit > plain + 0.05
    with pytest.raises(ValueError, match="method 'efl' scores pairs"):
        quick("efl", class_weight="balanced").fit(TEXTS, y)
    for weights, words in (
        (dict(rar=5), "did you mean 'rare'"),
        (dict(rare=0), "a positive number"),
        ("even", "must be None or 'balanced'"),
    ):
        with pytest.raises(ValueError, match=words):
            quick(class_weight=weights).fit(TEXTS, y)


def test_a_killed_fit_resumes(quick, tmp_path, monkeypatch):
    want = quick(steps=6, evaluations=3).fit(TEXTS, LABELS).predict_proba(TEXTS)
    taken = stop_at(monkeypatch, 5)
    clf = quick(steps=6, evaluations=3)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(TEXTS, LABELS, resume=tmp_path)
    assert (clf.fit(TEXTS, LABELS, resume=tmp_path).predict_proba(TEXTS) == want).all() and len(
        taken
    ) == 5 + 2
    clf.fit(TEXTS, LABELS, resume=tmp_path)  # nothing is left to train
    assert len(taken) == 5 + 2


def test_a_learning_rate_is_chosen_and_the_card_states_it(quick, tmp_path):
    clf = quick(lr="auto").fit(TEXTS, LABELS)
    assert clf.config_.lr in METHODS["lpt-npg"].learning_rates and clf.lr == "auto"
    clf.save_pretrained(
        tmp_path / "model",
        control_records=[{**clf.record_, "method": "majority", "validation": 30.0}],
    )
    card = (tmp_path / "model/README.md").read_text()
    assert "No record" not in card
    rates = ", ".join(f"{r:g}" for r in METHODS["lpt-npg"].learning_rates)
    for words in (
        f"2 validation | accuracy {clf.log_.validation:.1f} |",
        "| majority | 2 validation | accuracy 30.0 |",
        "Trained on 22 examples",
        f"learning rate: best of {rates}",
        f"learning rate {clf.config_.lr:g} and seed",
        "`a`, `b`, `c`",
        "W₂",
    ):
        assert words in card, words
    again = pickle.loads(pickle.dumps(PromptClassifier.from_pretrained(tmp_path / "model")))
    assert (
        again.record_["checkpoint_selection"] == clf.record_["checkpoint_selection"]
        and str(tmp_path) not in card
    )


def test_word_vectors_of_a_file_are_found_again(quick, tmp_path):
    """They are not saved: a copy and a pickle know their path, and for a folder it is given."""
    words = dict.fromkeys(" ".join(TEXTS).split())
    (glove := tmp_path / "vectors.txt").write_text(
        "".join(f"{w} {i % 5}.5 {i % 3} 1\n" for i, w in enumerate(words))
    )
    clf = quick("m-idpg-phm-glove", glove=str(glove)).fit(TEXTS, LABELS)
    want = clf.predict_proba(TEXTS)
    clf.save_pretrained(tmp_path / "model")
    again = PromptClassifier.from_pretrained(tmp_path / "model", glove=glove)
    for other in (
        again,
        deepcopy(clf),
        pickle.loads(pickle.dumps(clf)),
        pickle.loads(pickle.dumps(again)),
    ):
        assert (other.predict_proba(TEXTS) == want).all() and other.glove == str(glove)
    with pytest.raises(ValueError, match="as glove="):
        PromptClassifier.from_pretrained(tmp_path / "model")


def test_the_regressor_predicts_numbers(quick, tmp_path):
    y = np.array([len(t) + 0.5 for t in TEXTS])
    reg = quick(cls=PromptRegressor, method="prompt-tuning").fit(TEXTS, y)
    assert reg.predict(TEXTS).shape == (24,) and reg.score(TEXTS, y) <= 1
    reg.save_pretrained(tmp_path)
    assert (PromptRegressor.from_pretrained(tmp_path).predict(TEXTS) == reg.predict(TEXTS)).all()
    bad_labels = [
        ([float("nan")] * 24, "label 0: every row needs a label, got nan"),
        (["a"] * 24, "must be a number"),
        (np.ones((24, 2)), "must be a number, got array"),
    ]
    for labels, words in bad_labels:
        with pytest.raises(ValueError, match=words):
            quick(cls=PromptRegressor).fit(TEXTS, labels)
    with pytest.raises(ValueError, match="regression target"):
        quick().fit(TEXTS, y)


def test_cross_validation_grid_search_and_pipelines(quick):
    clf = quick()
    assert cross_val_score(clf, TEXTS, LABELS, cv=2).shape == (2,)
    lower = FunctionTransformer(lambda X: [t.lower() for t in X])
    search = GridSearchCV(
        Pipeline([("lower", lower), ("clf", clf)]), dict(clf__prompt_length=[2, 3]), cv=2
    )
    assert search.fit(TEXTS, LABELS).best_params_["clf__prompt_length"] in (2, 3)
    fitted = clone(clf).fit(TEXTS, LABELS)
    copied = pickle.loads(data := pickle.dumps(fitted))
    assert (
        copied.predict_proba(TEXTS) == fitted.predict_proba(TEXTS)
    ).all() and b"_rebuild_tensor" not in data


# --- scikit-learn's own checks


class Numbers(PromptClassifier):
    """A classifier that takes a table of numbers as texts, as scikit-learn's checks need."""

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        tags.input_tags.one_d_array = False
        tags.input_tags.string = False
        return tags

    def fit(self, X, y=None):
        if y is None:
            return super().fit(X, y)
        shape = np.asarray(y).shape
        has_several_labels = len(shape) == 2 and shape[1] > 1
        X, y = validate_data(self, X, y, multi_output=has_several_labels)
        return super().fit(self.to_texts(X), y)

    def to_texts(self, X):
        return [" ".join(map("{:.1f}".format, row)) for row in X]

    def _predict_rows(self, X):
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self)
        return super()._predict_rows(self.to_texts(validate_data(self, X, reset=False)))


def check_results(estimator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    return {r["check_name"]: (r["status"], str(r["exception"])) for r in results}


NOT_PASSED = {  # checks of scikit-learn that an estimator of texts does not pass, and why
    "check_classifiers_train": "needs 83 % on numbers, after two steps on their digits",
    "check_class_weight_classifiers": "needs an effect of extreme weights within two steps",
    "check_classifiers_multilabel_output_format_decision_function": "skipped: there is none",
    "check_array_api_input": "skipped by scikit-learn: texts are not arrays of numbers",
}


@pytest.mark.long
def test_scikit_learns_own_checks(quick):
    """An estimator of texts gets one check, and one that takes tables of numbers gets all."""
    assert check_results(quick()) == {"check_estimator_cloneable": ("passed", "None")}
    results = check_results(quick(cls=Numbers, controls=True))
    assert {name for name, (status, _) in results.items() if status != "passed"} == {
        *NOT_PASSED
    } and len(results) >= 45


def test_options_can_be_numpy_numbers(quick, tmp_path):
    clf = quick(
        prompt_length=np.int64(3),
        seed=np.int64(1),
        clip=np.float32(1),
        two_layer_head=np.bool_(True),
    ).fit(TEXTS, LABELS)
    clf.save_pretrained(tmp_path)
    assert (clf.config_.get("prompt_length"), clf.config_.two_layer_head) == (3, True) and type(
        clf.config_.seed
    ) is int
    assert (
        pickle.loads(pickle.dumps(clf)).predict(TEXTS[:3]).tolist()
        == clf.predict(TEXTS[:3]).tolist()
    )


def test_labels_of_two_types_are_refused(quick):
    with pytest.raises(
        ValueError, match="but that of label 0 is 1: write all labels as texts, or all"
    ):
        quick().fit(TEXTS, [1, "a"] * 12)


def test_a_model_of_a_bundled_task_predicts_its_label_names(small_folder, tmp_path):
    """TREC's codes on the Hub are not names of classes."""
    from dataclasses import replace

    from small import small_task

    from idp_tutorial.assembly.build import build_model
    from idp_tutorial.backbones.load import load_backbone
    from idp_tutorial.data.tasks import TASKS
    from idp_tutorial.saving.prompt_files import save_pretrained

    cfg = RunConfig(
        "lpt", task="trec", backbone=str(small_folder), prompt_length=2, lr=1e-3, device="cpu"
    )
    task = replace(TASKS["trec"], splits=small_task("questions").splits)
    save_pretrained(build_model(cfg, load_backbone(cfg.backbone), task), tmp_path, task, cfg)
    assert PromptClassifier.from_pretrained(tmp_path).classes_.tolist() == list(
        TASKS["trec"].labels
    )


# ---- several labels of a text

SEVERAL = [[], ["here"], ["red", "here"], ["red"]] * 6
INDICATORS = np.array([[int(n in names) for n in ("here", "red")] for names in SEVERAL])


def test_lists_of_labels_are_predicted_as_lists(quick, tmp_path):
    clf = quick(metric="macro_f1").fit(TEXTS, SEVERAL)
    assert clf.classes_.tolist() == ["here", "red"] and clf.record_["metric"] == "macro_f1"
    probabilities = clf.predict_proba(TEXTS)
    predicted = clf.predict(TEXTS)
    assert predicted == [clf.classes_[p > 0.5].tolist() for p in probabilities]
    is_correct = [{*a} == {*b} for a, b in zip(predicted, SEVERAL)]
    assert clf.score(TEXTS, SEVERAL) == pytest.approx(np.mean(is_correct))
    clf.save_pretrained(tmp_path)
    for loaded in (PromptClassifier.from_pretrained(tmp_path), pickle.loads(pickle.dumps(clf))):
        assert loaded.predict(TEXTS) == predicted and loaded.score(TEXTS, SEVERAL) == clf.score(
            TEXTS, SEVERAL
        )
        assert loaded.metric == "macro_f1"
    with pytest.raises(
        ValueError,
        match=r"row 0: label must be a list of label names.* \(here, red\) .* got \['blue'\]",
    ):
        clf.score(TEXTS[:1], [["blue"]])


def test_indicators_are_predicted_as_indicators(quick):
    clf = quick().fit(TEXTS, INDICATORS)
    predicted = clf.predict(TEXTS)
    assert predicted.shape == INDICATORS.shape and {*predicted.ravel()} <= {0, 1}
    assert (predicted == (clf.predict_proba(TEXTS) > 0.5)).all()
    assert (pickle.loads(pickle.dumps(clf)).predict(TEXTS) == predicted).all()
    for y in (pd.DataFrame(INDICATORS), INDICATORS.tolist()):
        assert clf.score(TEXTS, y) == clf.score(TEXTS, INDICATORS)
    with pytest.raises(ValueError, match="every row of y must have 2 indicators"):
        clf.score(TEXTS[:1], [[1, 0, 0]])


def test_one_list_a_text_is_a_column_of_single_labels(quick):
    clf = quick().fit(TEXTS, [[label] for label in LABELS])
    assert clf.label_form_ == "single" and clf.predict(TEXTS[:2]).shape == (2,)
    with pytest.raises(ValueError, match="have one label each, but some of these have several"):
        quick().fit(TEXTS, LABELS, (TEXTS, SEVERAL))


@pytest.mark.parametrize("y", [LABELS, SEVERAL, INDICATORS], ids=["single", "lists", "matrix"])
def test_a_report_scores_what_the_estimator_predicts(y, quick, tmp_path):
    clf = quick().fit(TEXTS, y)
    report = clf.report(TEXTS, y, tmp_path)
    name = "accuracy" if y is LABELS else "subset_accuracy"
    assert report.scores[name] == pytest.approx(100 * clf.score(TEXTS, y))
    assert (tmp_path / "report.md").is_file() and len(report.errors) <= len(TEXTS)
    assert clf.report(iter(TEXTS), y).scores == report.scores  # the texts are read once


def test_a_report_of_numbers_is_in_their_units(quick):
    y = np.linspace(10, 20, len(TEXTS))
    reg = quick(cls=PromptRegressor).fit(TEXTS, y)
    mae = np.abs(reg.predict(TEXTS) - y).mean()
    assert reg.report(TEXTS, y).scores["mae"] == pytest.approx(mae)


def test_a_warm_start_continues_from_the_trained_prompts_and_head(quick):
    clf = quick(lr=1e-2, steps=20).fit(TEXTS, LABELS)
    first = clf.predict_proba(TEXTS)
    config = deepcopy(clf.config_)
    clf.set_params(lr=1e-30, steps=1)
    again = clone(clf).fit(TEXTS, LABELS)
    assert np.abs(again.predict_proba(TEXTS) - first).max() > 0.01
    assert "warm_start" not in again.record_
    for warm in (dict(option=True, fit=None), dict(option=False, fit=True)):
        clf.set_params(warm_start=warm["option"])
        clf.fit(TEXTS, LABELS, warm_start=warm["fit"])
        np.testing.assert_allclose(clf.predict_proba(TEXTS), first, atol=1e-6)
        assert clf.record_["warm_start"] is True
    assert clf.config_.lr != config.lr


def test_a_warm_start_begins_with_the_last_loss(quick):
    losses = []

    def loss_of(model):
        rows = [dict(sentence1=text, label="abc".index(y)) for text, y in zip(TEXTS, LABELS)]
        batch = collate(encode_rows(clf.task_, rows, model.backbone, 32, None), 0)
        was_training = model.training
        with torch.no_grad():
            losses.append(model.eval()(batch, return_loss=True).item())
        model.train(was_training)

    class FirstLoss:
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            loss_of(model)

    clf = quick("prompt-tuning", lr=1e-2, steps=8).fit(TEXTS, LABELS)
    loss_of(clf.model_)
    for warm_start in (True, False):
        clf.fit(TEXTS, LABELS, warm_start=warm_start, callbacks=[FirstLoss()])
    last, warm, cold = losses
    assert warm == pytest.approx(last, rel=1e-5) and abs(cold - last) > 1e-3


@pytest.mark.parametrize(
    "change,message",
    [
        (
            lambda clf: clf.fit(TEXTS, ["x", "y"] * 12),
            r"\('a', 'b', 'c'\), False\), but this fit has .*\('x', 'y'\)",
        ),
        (
            lambda clf: clf.set_params(method="lpt").fit(TEXTS, LABELS),
            r"\('lpt-npg', .*, but this fit has \('lpt', ",
        ),
        (
            lambda clf: clf.set_params(prompt_length=3).fit(TEXTS, LABELS),
            "other trained tensors: use the same options",
        ),
    ],
    ids=["classes", "method", "prompt length"],
)
def test_a_warm_start_of_another_model_is_refused_and_changes_nothing(quick, change, message):
    clf = quick(warm_start=True).fit(TEXTS, LABELS)
    before = clf.predict_proba(TEXTS)
    with pytest.raises(ValueError, match=message):
        change(clf)
    assert clf.classes_.tolist() == ["a", "b", "c"]
    clf.set_params(method="lpt-npg", prompt_length=2)
    np.testing.assert_array_equal(clf.predict_proba(TEXTS), before)


def test_verbose_shows_a_progress_bar_and_callbacks_are_called(quick, capsys):
    class Counter:
        n = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.n += 1

    counter = Counter()
    quick(verbose=False).fit(TEXTS, LABELS, callbacks=[counter])
    assert counter.n == 2 and capsys.readouterr().err == ""
    quick(verbose=True).fit(TEXTS, LABELS)
    assert "2/2" in capsys.readouterr().err


def test_each_learning_rate_has_its_own_object_of_a_callback_class(quick):
    counters = []

    class Counter:
        def __init__(self):
            counters.append(self)
            self.n = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.n += 1

    quick(lr="auto").fit(TEXTS, LABELS, callbacks=iter([Counter]))
    assert len(counters) == len(METHODS["lpt-npg"].learning_rates)
    assert {counter.n for counter in counters} == {2}


def test_a_callback_that_is_not_in_a_list_is_refused(quick):
    class Counter:
        def on_step_end(self, args, state, control, **kwargs):
            pass

    with pytest.raises(ValueError, match="callbacks must be a list of transformers"):
        quick().fit(TEXTS, LABELS, callbacks=Counter())


def test_a_resumed_warm_start_trains(quick, tmp_path):
    """Each start has checkpoints of its own, so that the finished one is not loaded again."""
    clf = quick(lr=1e-2).fit(TEXTS, LABELS, resume=tmp_path)
    probabilities = [clf.predict_proba(TEXTS)]
    for _ in range(2):
        clf.fit(TEXTS, LABELS, resume=tmp_path, warm_start=True)
        probabilities.append(clf.predict_proba(TEXTS))
    first, second, third = probabilities
    assert not (first == second).all() and not (second == third).all()


def test_a_method_that_is_registered_later_does_not_concern_others(quick):
    rows = dict(METHODS)

    @register("late", reference="this test", learning_rates=(1e-3, 1e-2, 1e-1))
    @dataclass(frozen=True, kw_only=True)
    class LateConfig(LatePromptConfig):
        """Options of a method that is registered after the estimators were imported."""

        late_width: int = 4  # width of a layer

    try:
        assert quick("head-only").fit(TEXTS, LABELS).predict(TEXTS).shape == (24,)
    finally:
        METHODS.clear()
        METHODS.update(rows)


def test_a_report_and_a_score_accept_what_predict_accepts(quick, tmp_path):
    frame = pd.DataFrame(dict(message=TEXTS, topic=LABELS))
    clf = quick().fit(frame, text="message", label="topic")
    clf.save_pretrained(tmp_path)
    loaded = PromptClassifier.from_pretrained(tmp_path)
    want = clf.report(frame, LABELS).scores
    assert clf.report(TEXTS, LABELS).scores == want
    for report in (loaded.report(frame, LABELS), loaded.report(frame)):
        assert report.scores == want and "topic" not in str(report.errors)
    frame = pd.DataFrame(dict(message=TEXTS, topic=SEVERAL))
    several = quick().fit(frame, text="message", label="topic")
    score = several.score(TEXTS, SEVERAL)
    assert several.score(frame) == pickle.loads(pickle.dumps(several)).score(frame) == score


def test_a_copy_has_the_log_and_the_share_of_cut_texts(quick):
    clf = quick(max_len=4).fit(TEXTS, LABELS, validation=(TEXTS, LABELS))
    for copied in (pickle.loads(pickle.dumps(clf)), deepcopy(clf)):
        assert copied.cut_share_ == 1 and copied.log_.history == clf.log_.history


def test_a_warm_start_has_the_backbone_of_a_path(quick, small_folder):
    clf = pickle.loads(pickle.dumps(quick(backbone=Path(small_folder)).fit(TEXTS, LABELS)))
    assert clf.fit(TEXTS, LABELS, warm_start=True).record_["warm_start"] is True


def test_controls_are_scored_on_the_validation_texts_and_a_better_one_is_named(quick):
    """Two training steps learn nothing of a label that a word tells."""
    texts = [f"{word} number {i}" for i in range(20) for word in ("ball", "law", "bread")]
    labels = ["sport", "court", "food"] * 20
    clf = quick("prompt-tuning", controls=True, lr=1e-6)
    with pytest.warns(UserWarning, match=r"prompt-tuning \(.*\) scores lower than words"):
        clf.fit(texts, labels)
    assert clf.controls_.keys() == {"words", "probe"} and clf.controls_["words"] == 100
    assert pickle.loads(pickle.dumps(clf)).controls_ == clf.controls_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(quick(controls=False).fit(texts, labels), "controls_")


def test_controls_change_neither_the_model_nor_a_regression(quick):
    values = [float(len(text)) for text in TEXTS]
    fits = [
        quick("lpt", PromptRegressor, controls=controls).fit(TEXTS, values)
        for controls in (False, True)
    ]
    assert np.array_equal(*(clf.predict(TEXTS) for clf in fits))
    assert {*fits[1].controls_} == {"words", "probe"}


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_real_backbone_is_used_if_one_is_installed(is_installed, monkeypatch):
    folder = Path("minilm") if is_installed else None
    monkeypatch.setattr(estimator, "find_local_backbone", lambda name, verify: folder)
    make_config = PromptClassifier(steps=1)._make_config
    task = SimpleNamespace(name="own", splits=dict(train=[]))
    if is_installed:
        assert make_config(task).backbone == "minilm"
    else:
        with pytest.warns(UserWarning, match="backbone tiny, .* pip install .*idp_tutorial.back"):
            assert make_config(task).backbone == "tiny"
    assert PromptClassifier(backbone="tiny")._make_config(task).backbone == "tiny"


def test_a_pickle_without_a_newer_option_has_its_default(quick):
    clf = quick()
    state = {name: value for name, value in clf.__getstate__().items() if name != "controls"}
    old = object.__new__(PromptClassifier)
    old.__setstate__(state)
    assert old.controls is True and old.backbone == clf.backbone


def test_two_dictionaries_are_a_table_for_validation(quick):
    rows = [dict(text=text, label=label) for text, label in zip(TEXTS, LABELS)]
    assert len(quick().fit(rows[:20], validation=rows[20:22]).predict(TEXTS)) == len(TEXTS)
