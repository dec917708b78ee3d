"""Claims and their verdicts, and the links from the pages to the claims."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from claim_records import record

from idp_tutorial.data.task import Task
from idp_tutorial.reproduction.papers import claims
from idp_tutorial.reproduction.papers.claims import (
    CLAIM_COLUMNS,
    COMPUTED_COLUMNS,
    judge_claims,
    measure_claim,
    read_claims,
    render_claims_page,
    write_claims,
)
from idp_tutorial.reproduction.papers.published_scores import (
    load_published_scores,
)
from idp_tutorial.runs.conclusions import decide_verdict
from idp_tutorial.runs.contrasts import (
    estimate_contrast,
    has_per_example_results,
    per_example_accuracy,
)
from idp_tutorial.runs.logits import write_run_arrays

ROOT = Path(__file__).resolve().parents[3]


CLAIMS = ROOT / "results/claims.csv"


NUMBER = r"(\d+|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty)"


PAPER = re.compile(
    r"\b(papers?|authors|abstract)\b|\b(Table|Figure|Fig\.)\s*\d|"
    r"\b(IDPG|LPT|ID-SPAM)['’]s (headline|order|template)\b"
)


RESULT = re.compile(
    rf"\b(outperform\w*|better|worse|beats?|{NUMBER} points?|points (above|below)|"
    r"gains?|improve\w*|"
    r"the best|comparable|on par|ahead|hump|fastest|seen here|effects? (is|are) there|"
    r"in the papers?['’]s? order|"
    r"(more|less|fewer|faster|slower|higher|lower)\b[^.:;]*\bthan in)\b",
    re.I,
)


VERDICT = {  # patterns of sentences that state a verdict; the first that matches counts
    "not seen": re.compile(
        r"\b(not|no|none|nothing|never|nowhere)\b[^.:;]*\bseen\b|\*not seen\*", re.I
    ),
    "seen": re.compile(r"\b(is|are|was|were)( \w+)? \*{0,2}seen\b|\*seen\*"),
    "opposite": re.compile(r"\bopposite\b"),
    "open": re.compile(r"\b(is|are|stays?|remains?) \[?\*{0,2}open\b|\*open\*"),
}


LINK = re.compile(r"claims(?:\.ipynb|\.html|\.md)?#([\w-]+)")


def test_the_better_control_is_chosen_per_setting():
    controls = [
        record(m, s, v, task=t, validation=v)
        for s in range(5)
        for t, m, v in (
            ("t", "probe", 80.0),
            ("t", "side-network", 70.0),
            ("u", "probe", 60.0),
            ("u", "side-network", 90.0),
        )
    ]
    mine = [
        record("a", s, 85.0, task=t, layer=layer)
        for s in range(5)
        for t in "tu"
        for layer in (2, 4)
    ]
    for fields, rs in (((), mine[::2]), (("layer",), mine)):
        # 5 above the probe, 5 below the side network
        estimate = claims._contrast_with_best_control("a", rs, controls, {}, fields)
        assert estimate["effect"] == 0.0


@pytest.fixture
def results(tmp_path):
    """Records on 40 examples, five seeds: `a` is correct on all, `b` on 30, a probe on 36."""
    task = Task("t", labels=("x", "y"), splits=dict(test=[dict(label=i % 2) for i in range(40)]))
    good = np.eye(2)[[i % 2 for i in range(40)]]
    for name, errs in (("runs", dict(a=0, b=10)), ("controls-b", dict(probe=4))):
        lines = []
        for m, n in errs.items():
            for s in range(5):
                out = good.copy()
                out[:n] = out[:n, ::-1]
                file = tmp_path / f"claims/logits/{name}.npz"
                fields = write_run_arrays(file, f"{m}{s}", dict(test=out.astype(np.float16)))
                lines.append(json.dumps(record(m, s, 100 - 2.5 * n, **fields)))
        (tmp_path / f"claims/{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path, task


def test_examples_are_paired_if_logits_are_stored(results):
    folder, task = results
    rs = [json.loads(l) for l in (folder / "claims/runs.jsonl").read_text().splitlines()]
    f = estimate_contrast(rs, "a", "b", {"t": task}, folder / "claims")
    assert (f["effect"], f["texts"], f["runs"]) == (25.0, 40, 5)
    assert (
        decide_verdict(f, 20.0),
        decide_verdict(f, -20.0),
        decide_verdict(f, expected_sign="="),
    ) == ("seen", "opposite", "opposite")
    assert per_example_accuracy(rs[0], folder / "claims", task).tolist() == [100.0] * 40
    with pytest.raises(ValueError, match="Give the data"):
        per_example_accuracy(
            rs[0],
            folder / "claims",
            Task("t", labels=("x", "y"), splits=dict(test=[dict(label=0)])),
        )


def test_idp_reproduce_updates_verdicts_from_records(results, monkeypatch, capsys):
    """The command changes computed columns only, and a second call changes nothing."""
    from idp_tutorial.cli.reproduce import reproduce_command
    from idp_tutorial.reproduction.papers import claims

    folder, task = results
    monkeypatch.setattr(claims, "load_task", lambda *a: task)
    row = dict.fromkeys(CLAIM_COLUMNS, "") | dict(
        id="x",
        paper="LPT",
        where="§1",
        sentence="s",
        contrast="c",
        published="20",
        family="f",
        a="a",
        b="b",
        records="claims/runs.jsonl",
        verdict="open",
        decides="runs",
    )
    counted = row | dict(id="y", a="", b="", family="", records="counted", verdict="seen")
    write_claims([row, counted], folder / "claims.csv")
    reproduce_command(claims=str(folder / "claims.csv"), data="somewhere")
    assert "seen (was open)" in capsys.readouterr().out
    one, two = read_claims(folder / "claims.csv")
    assert (one["effect"], one["texts"], one["verdict"], two) == ("25.00", "40", "seen", counted)
    assert one["above"].startswith("+10.0") and {
        k: one[k] for k in row if k not in COMPUTED_COLUMNS
    } == {k: row[k] for k in row if k not in COMPUTED_COLUMNS}
    assert judge_claims([one, two], folder, "somewhere") == [one, two]


def test_a_control_counts_only_with_the_same_few_shot_samples(tmp_path):
    row = dict(a="a", b="b", keep="", records="claims/runs.jsonl")
    (tmp_path / "claims").mkdir()

    def write(name, methods, draws):
        lines = [
            json.dumps(record(m, s, v, split_seed=d))
            for m, v in methods.items()
            for d in range(draws)
            for s in range(2)
        ]
        (tmp_path / f"claims/{name}.jsonl").write_text("\n".join(lines) + "\n")

    write("runs", dict(a=80.0, b=70.0), 4)
    for draws, above in ((1, None), (4, 5.0)):
        write("controls-b", dict(probe=75.0, **{"side-network": 60.0}), draws)
        estimate, over = measure_claim(row, tmp_path)
        assert estimate["effect"] == 10 and (over and over["effect"]) == above


def test_p_values_of_a_family_are_corrected(results):
    folder, _ = results
    row = dict.fromkeys(CLAIM_COLUMNS, "") | dict(
        published="20", family="f", a="a", b="b", records="claims/runs.jsonl"
    )
    (alone,) = judge_claims([row | dict(id="0")], folder)
    many = judge_claims([row | dict(id=str(i)) for i in range(4)], folder)
    assert float(many[0]["p"]) == pytest.approx(4 * float(alone["p"]), rel=0.2)


def test_claims_csv_agrees_with_the_records():
    """Effects, intervals and verdicts are those computed from the records."""
    rows = read_claims(CLAIMS)
    assert len(rows) >= 40 and {r["paper"] for r in rows} == {"IDPG", "LPT", "ID-SPAM"}
    page = render_claims_page(rows)
    assert all(f'id="{r["id"]}"' in page for r in rows)
    for old, new in zip(rows, judge_claims(rows, ROOT / "results")):
        for c in COMPUTED_COLUMNS:
            close = c in ("effect", "low", "high", "p", "detectable") and old[c] and new[c]
            assert (
                float(old[c]) == pytest.approx(float(new[c]), abs=0.011)
                if close
                else old[c] == new[c]
            ), (old["id"], c)


def blocks(page):
    """The paragraphs of a page and its lines of lists and tables, without code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(c["source"]) for c in cells)
    return re.split(r"\n\s*\n|\n(?=[|*-] )", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S))


PAGES = [
    ROOT / "README.md",
    ROOT / "nbs/index.ipynb",
    *sorted((ROOT / "nbs/course").glob("*.ipynb")),
    *sorted((ROOT / "nbs/lab").glob("*.ipynb")),
]


def sentences(page):
    """Yield each sentence, the claims that it links to, and those that its paragraph links to."""
    for b in blocks(page):
        for s in re.split(r"(?<=[.!?])\s+(?!\d)", " ".join(b.split())):
            yield s, LINK.findall(s), LINK.findall(b)


def without_row(page):
    """Sentences on a paper's result in a paragraph that links to no claim."""
    return [
        s for s, _, links in sentences(page) if PAPER.search(s) and RESULT.search(s) and not links
    ]


def stated_verdicts(sentence):
    """The verdicts that a sentence states; `not seen` is removed first."""
    verdicts = []
    rest = re.sub(r"\]\([^)]*\)", "]", sentence)
    for v, words in VERDICT.items():
        if words.search(rest):
            verdicts.append(v)
            rest = words.sub("", rest)
    return verdicts


def against_row(page, verdicts):
    """Sentences whose verdicts are not those of the claims that they link to."""
    for s, own_links, links in sentences(page):
        stated = set(stated_verdicts(s))
        ids = own_links or (links if PAPER.search(s) else ())
        stored = {verdicts[i] for i in ids if i in verdicts}
        if stated and stored and (stated - stored or (own_links and stored - stated)):
            yield s, sorted(stated), sorted(stored)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_statements_on_papers_link_to_claims(page):
    """README, course and lab: a paragraph with a result of a paper links to the claim."""
    alone = without_row(page)
    assert not alone, f"without a link to claims.ipynb#ID: {alone}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_verdicts_in_prose_are_those_of_the_claims(page):
    """A sentence with *seen*, *not seen*, *opposite* or *open* agrees with claims.csv."""
    mismatches = [*against_row(page, {r["id"]: r["verdict"] for r in read_claims(CLAIMS)})]
    assert not mismatches, f"(sentence, its verdicts, those of claims.csv): {mismatches}"


@pytest.mark.parametrize(
    "text,n",
    [
        ("The paper has a gain of 3 points.", 1),
        ("See [it](claims.md#x): the paper gains 3 points.", 0),
        ("We gain 3 points.", 0),
        ("`the paper gains`", 0),
        ("So the paper's effect is there, and it is small.", 1),
        ("The static prompt learns fastest in the middle, as in the paper's Figure 2.", 1),
        (
            "Of IDPG's order (its Table 1: every layer above one) only the second half "
            "is seen here.",
            1,
        ),
        ("On MiniLM the groups stand in the papers' order: input, every layer, late.", 1),
        ("In Table 6 ID-SPAM and SMoP lie within five points and prompt tuning sixteen below.", 1),
        ("More memory is saved than in the paper's columns.", 1),
        (
            "Where the model fills LPT's template, generators end 24 points and more above "
            "prompt tuning.",
            1,
        ),
    ],
)
def test_a_sentence_without_a_link_is_detected(text, n, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(without_row(page)) == n


@pytest.mark.parametrize(
    "text,n",
    [
        ("[This](claims.md#a) is *not seen*.", 0),
        ("[This](claims.md#a) is *seen*.", 1),
        ("[This](claims.md#b) is seen.", 0),
        ("[This](claims.md#b) is not seen here.", 1),
        ("Nothing of [this](claims.md#a) is seen.", 0),
        ("[This](claims.md#c) is *open*.", 0),
        ("[This](claims.md#c) is not seen in eight layers.", 1),
        ("[This](claims.md#a) is *not seen*, [that](claims.md#b) is *seen*.", 0),
        ("[This](claims.md#a) is the opposite.", 1),
        ("See [this](claims.md#a). The half of its Table 1 is seen here.", 1),
        ("See [this](claims.md#a). No prompt of ours is seen to add something.", 0),
    ],
)
def test_a_sentence_with_another_verdict_is_detected(text, n, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len([*against_row(page, dict(a="not seen", b="seen", c="open"))]) == n


def test_links_to_claims_have_a_target():
    ids = {r["id"] for r in read_claims(CLAIMS)}
    pages = [ROOT / "README.md", *(ROOT / "nbs").rglob("*.ipynb"), *(ROOT / "docs").glob("*.md")]
    broken = [
        (p.name, i)
        for p in pages
        for i in LINK.findall(p.read_text(encoding="utf-8"))
        if i not in ids
    ]
    assert not broken, broken


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("verdict", "proved", "verdict of claim .* must be"),
        ("decides", "", "has no decides"),
        ("sentence", "", "has no sentence"),
        ("id", "idpg-m-over-prompt", "is used twice"),
    ],
)
def test_an_incomplete_claim_is_refused(field, value, words, tmp_path):
    import csv

    rows = read_claims(CLAIMS)
    rows = [rows[0], {**next(r for r in rows[1:] if r["verdict"] == "open"), field: value}]
    with open(tmp_path / "c.csv", "w", newline="", encoding="utf-8") as f:
        w = csv.DictWriter(f, CLAIM_COLUMNS)
        w.writeheader()
        w.writerows(rows)
    with pytest.raises(ValueError, match=words):
        read_claims(tmp_path / "c.csv")


def test_claims_can_be_written_as_json():
    json.dumps(read_claims(CLAIMS))


def record_with_logits(folder, name, label=(0, 1, 1), **kw):
    arrays = dict(test=np.eye(2)[[0, 1, 0]], test_label=np.array(label))
    fields = write_run_arrays(folder / "logits/runs.npz", name, arrays)
    return dict(record("a", 0, 50.0), **fields, folder=folder, **kw)


def test_examples_are_compared_only_if_the_score_is_accuracy(tmp_path):
    a = record_with_logits(tmp_path, "a")
    assert has_per_example_results(a, tmp_path)
    for other in (
        dict(metric="accuracy+f1"),
        dict(metric="f1+exact"),
        dict(task="copa"),
        dict(metric="pearson"),
    ):
        assert not has_per_example_results({**a, **other}, tmp_path)


def test_an_open_claim_needs_what_would_decide_it(tmp_path):
    sides = dict(id="i", a="lpt", b="probe", records="none.jsonl", family="f")
    row = dict.fromkeys(CLAIM_COLUMNS, "") | sides | dict(verdict="seen")
    with pytest.raises(ValueError, match="claim 'i' is open with these records"):
        judge_claims([row], tmp_path)
    assert judge_claims([row | dict(decides="more seeds")], tmp_path)[0]["verdict"] == "open"


I = "idpg-1"


L1 = "lpt-1"


L2 = "lpt-2"


L4 = "lpt-4"


# a claim's difference: a table, two of its methods, and conditions; without these the mean of all
# tasks counts
PRINTED = {
    "idpg-m-over-prompt": (I, "M-IDPG-PHM", "Prompt-tuning", {}),
    "idpg-m-over-ptv2": (I, "M-IDPG-PHM", "Ptuningv2", {}),
    "idpg-compacter": (I, "M-IDPG-PHM", "Compacter", {}),
    "idpg-phm-dnn": (I, "S-IDPG-PHM", "S-IDPG-DNN", {}),
    "idpg-phm-dnn-m": (I, "M-IDPG-DNN", "M-IDPG-PHM", {}),
    "idpg-glove": (I, "M-IDPG-PHM-GloVe", "M-IDPG-PHM", {}),
    "idpg-134": (I, "M-IDPG-PHM", "Prompt-tuning-134", {}),
    "idpg-instance": (I, "S-IDPG-PHM", "Prompt-tuning", {}),
    "idpg-glove-wins": (I, "M-IDPG-PHM-GloVe", "Prompt-tuning", {}),
    "idpg-multi": (I, "M-IDPG-PHM", "S-IDPG-PHM", {}),
    "idpg-k100": ("idpg-3", "M-IDPG-PHM", "prompt tuning", dict(setting=["K=100"])),
    "idpg-k100-ptv2": ("idpg-3", "M-IDPG-PHM", "P-Tuningv2", dict(setting=["K=100"])),
    "lpt-late": (L1, "LPT w/o PG", "Prompt Tuning", {}),
    "lpt-late-lm": (L1, "LPT w/o PG", "Prompt Tuning", {}),
    "lpt-all-prompts": (L1, "LPT w/ NPG", "S-IDPG-PHM", {}),
    "lpt-adapterdrop": (L1, "LPT w/ MPPG", "AdapterDrop", {}),
    "lpt-npg": (L4, "LPT w/ NPG", "LPT w/o PG", {}),
    "lpt-npg-lm": (L4, "LPT w/ NPG", "LPT w/o PG", {}),
    "lpt-other-ptms": (L4, "LPT w/o PG", "Prompt Tuning", {}),
    "lpt-50": (L2, "LPT w/ NPG", "Model Tuning", {}),
    "lpt-71": (L2, "LPT w/ NPG", "Adapter", {}),
    "lpt-ppg-few": (L2, "LPT w/ MPPG", "LPT w/ NPG", {}),
    "lpt-124": (L2, "LPT w/ NPG", "Prompt Tuning", dict(task=["SST-2", "TREC"])),
    "lpt-124-trec": (L2, "LPT w/ NPG", "Prompt Tuning", dict(task=["TREC"])),
    "spam-lpt": ("id-spam-2", "ID-SPAM", "LPT", dict(task=["Avg"], backbone=["RoBERTa-base"])),
    "spam-lora": ("id-spam-2", "ID-SPAM", "LoRA", dict(task=["Avg"], backbone=["RoBERTa-base"])),
    "spam-attention": ("id-spam-3", "ID-SPAM", "Mean-pooling", dict(task=["MRPC", "RTE", "QQP"])),
    "spam-zero": (
        "id-spam-6",
        "ID-SPAM",
        "LPT",
        dict(task=["QQP->MRPC", "MRPC->QQP", "SST-2->IMDB", "IMDB->SST-2"]),
    ),
    "spam-few": ("id-spam-11", "ID-SPAM", "LPT", dict(task=["QQP->MRPC"])),
    "spam-gpt2": ("id-spam-8", "ID-SPAM", "LPT", {}),
}


@pytest.mark.parametrize("one", PRINTED)
def test_a_published_difference_agrees_with_its_table(one):
    row = next(r for r in read_claims(CLAIMS) if r["id"] == one)
    table, a, b, only = PRINTED[one]
    cells = load_published_scores(table)
    for column, values in (
        dict(task=["Avg"], **only).items() if "task" not in only else only.items()
    ):
        cells = cells[cells[column].isin(values)]
    means = cells.groupby("method")["mean"].mean()
    assert float(row["published"]) == pytest.approx(means[a] - means[b], abs=0.06)


def test_every_published_difference_is_from_a_table_or_a_figure():
    elsewhere = {
        "idpg-single",
        "idpg-m16",
        "idpg-input",
        "idpg-sml",
        "idpg-residual",
    }  # of variants, or of a part of the tasks
    assert {r["id"] for r in read_claims(CLAIMS) if r["published"] and r["a"]} == {
        *PRINTED
    } | elsewhere


def test_the_page_states_records_and_what_would_decide_a_claim():
    row = dict.fromkeys(CLAIM_COLUMNS, "") | dict(
        id="a", paper="P", where="§1", sentence="s", contrast="c", decides="more"
    )
    ran = row | dict(
        a="x", b="y", records="r.jsonl", effect="1", low="0", high="2", runs="5", detectable="1"
    )

    def last(r):
        return render_claims_page([r]).splitlines()[-1].split("|")[-2].strip()

    decided = ran | dict(verdict="seen", tasks="trec", backbones="tiny")
    assert last(decided) == "trec with tiny: `r.jsonl`; to say more: more"
    assert (
        last(ran | dict(verdict="open", effect="")) == "to decide it: more"
    )  # its records do not exist yet
    assert last(row | dict(verdict="seen", records="counted", decides="")) == "counted"


@pytest.mark.parametrize(
    "text", ['{"sentence1": "a precious record"}\n', "", ",".join(CLAIM_COLUMNS) + "\n"]
)
def test_a_file_without_claims_is_not_overwritten(text, tmp_path, capsys):
    from idp_tutorial.cli.reproduce import reproduce_command

    (tmp_path / "f").write_text(text)
    with pytest.raises(SystemExit) as e:
        reproduce_command(claims=str(tmp_path / "f"))
    assert (
        e.value.code == 2
        and "holds no claims" in capsys.readouterr().err
        and (tmp_path / "f").read_text() == text
    )
