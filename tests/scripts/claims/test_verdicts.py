"""Claims and their verdicts, and the links from the pages to the claims."""

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
from claim_records import record

from idp_tutorial.data.metrics import compute_metric
from idp_tutorial.runs.logits import write_run_arrays
from idp_tutorial.runs.statistics import (
    correlation_by_example,
    estimate_contrast,
    has_per_example_results,
    paired_bootstrap,
    per_example_scores,
)
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records
from results.claims import verdicts
from results.claims.decision import decide_verdict
from results.claims.statements import STATEMENT_CHECKS, printed_differences
from results.claims.verdicts import (
    CLAIM_COLUMNS,
    COMPUTED_COLUMNS,
    judge_claims,
    measure_claim,
    read_claims,
    update_claims,
    write_claims,
)

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
    "not run": re.compile(r"\*not run\*"),
    "agrees": re.compile(r"\*agrees\*"),
    "differs": re.compile(r"\*differs\*"),
    "open": re.compile(r"\b(is|are|stays?|remains?) \[?\*{0,2}open\b|\*open\*"),
}


LINK = re.compile(r"claims(?:\.ipynb|\.html|\.md)?#([\w-]+)")


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch):
    """Skip the collection of garbage in statsmodels' correction, a second in a large process."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


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
        estimate = verdicts._contrast_with_best_control("a", rs, controls, fields)
        assert estimate["effect"] == 0.0


@pytest.fixture
def results(tmp_path):
    """Records on 40 examples, five seeds: `a` is correct on all, `b` on 30, a probe on 36."""
    labels = np.arange(40) % 2
    good = np.eye(2)[labels]
    for name, errs in (("runs", dict(a=0, b=10)), ("controls-b", dict(probe=4))):
        lines = []
        for m, n in errs.items():
            for s in range(5):
                out = good.copy()
                out[:n] = out[:n, ::-1]
                file = tmp_path / f"claims/logits/{name}.npz"
                arrays = dict(test=out.astype(np.float16), test_label=labels)
                fields = write_run_arrays(file, f"{m}{s}", arrays)
                lines.append(json.dumps(record(m, s, 100 - 2.5 * n, **fields)))
        (tmp_path / f"claims/{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_examples_are_paired_if_logits_are_stored(results):
    rs = [json.loads(l) for l in (results / "claims/runs.jsonl").read_text().splitlines()]
    f = estimate_contrast(rs, "a", "b", folder=results / "claims")
    assert (f["effect"], f["texts"], f["runs"]) == (25.0, 40, 5)
    assert (
        decide_verdict(f, 20.0),
        decide_verdict(f, -20.0),
        decide_verdict(f, expected_sign="="),
    ) == ("seen", "opposite", "opposite")
    assert per_example_scores(rs[0], results / "claims").tolist() == [100.0] * 40


def claim_row(**columns):
    """A claim on LPT's TREC: NPG minus a static prompt."""
    row = dict(
        id="x",
        paper="LPT",
        where="§1",
        sentence="s",
        contrast="c",
        kind="measured here",
        says=">",
        printed="lpt-1: LPT w/ NPG − LPT w/o PG",
        family="f",
        a="lpt-npg",
        b="lpt",
        records="claims/runs.jsonl",
        verdict="open",
        decides="runs",
    )
    return dict.fromkeys(CLAIM_COLUMNS, "") | row | columns


def write_runs(folder, a=80.0, b=60.0, methods=("lpt-npg", "lpt"), **fields):
    """Write five seeds of two methods, on TREC with LPT's head unless `fields` say otherwise."""
    fields = (
        dict(task="trec", head="verbalizer", lr=1e-3, steps=300, learning_rates_tried=[[1e-3, 1]])
        | fields
    )
    lines = []
    for method, score in zip(methods, (a, b)):
        for seed in range(5):
            lines.append(json.dumps(record(method, seed, score + seed / 10, **fields)))
    (folder / "claims").mkdir(exist_ok=True)
    (folder / "claims/runs.jsonl").write_text("\n".join(lines) + "\n")


def write_probe(folder, score):
    """Write five seeds of a control in the setting of `write_runs`."""
    fields = dict(task="trec", head="classification", validation=score)
    lines = [json.dumps(record("probe", seed, score, **fields)) for seed in range(5)]
    (folder / "claims/controls-b.jsonl").write_text("\n".join(lines) + "\n")


def change_records(folder, method, **change):
    """Change fields of the records of a method in `claims/runs.jsonl`."""
    file = folder / "claims/runs.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(r | change if r["method"] == method else r) for r in records]
    file.write_text("\n".join(lines) + "\n")


THREE_RATES = dict(learning_rates_tried=[[1e-3, 1], [2e-3, 1], [3e-3, 1]])


def test_idp_reproduce_updates_verdicts_from_records(results, capsys):
    """The command changes computed columns only, and a second call changes nothing."""
    folder = results
    text = (folder / "claims/runs.jsonl").read_text()
    text = text.replace('"a"', '"lpt-npg"').replace('"b", "seed"', '"lpt", "seed"')
    text = text.replace('"task": "t"', '"task": "trec"').replace(
        '"head": "h"', '"head": "verbalizer"'
    )
    (folder / "claims/runs.jsonl").write_text(text)
    counted = claim_row(
        id="lpt-third", a="", b="", kind="counted", family="", records="Table 1", verdict="differs"
    )
    write_claims([claim_row(), counted], folder / "claims.csv")
    update_claims(folder / "claims.csv")
    out = capsys.readouterr().out
    assert "seen on TREC with b (was open)" in out and "counted: 1 agrees" in out
    one, two = read_claims(folder / "claims.csv")
    assert (one["effect"], one["texts"], one["verdict"]) == ("25.0000", "40", "seen")
    assert (two["recomputed"], two["verdict"]) == ("0.324", "agrees")
    typed = [c for c in CLAIM_COLUMNS if c not in COMPUTED_COLUMNS]
    assert [one[c] for c in typed] == [claim_row()[c] for c in typed]
    assert judge_claims([one, two], folder) == [one, two]


@pytest.mark.parametrize(
    "fields,verdict,finding",
    [
        (dict(), "seen", ""),
        (dict(task="stsb"), "open", "higher on STS-B with b"),  # LPT does not have STS-B
        (dict(head="classification"), "open", "higher on TREC with b"),  # LPT has a verbalizer
        (dict(a=60.0, task="stsb"), "open", "no significant difference on STS-B with b"),
        (dict(a=40.0, task="stsb", shots=1000), "open", "lower on STS-B (1000 examples) with b"),
    ],
)
def test_a_verdict_needs_a_task_and_the_head_of_the_paper(fields, verdict, finding, tmp_path):
    write_runs(tmp_path, **fields)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert (row["verdict"], row["finding"]) == (verdict, finding)


def test_published_is_the_value_of_the_measured_tasks(tmp_path):
    write_runs(tmp_path)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["published"] == "+6.2"  # TREC, where the mean of ten tasks is +2.2
    write_runs(tmp_path, task="stsb")
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["published"] == ""  # the table has no STS-B


def test_no_verdict_where_the_paper_prints_the_other_sign(tmp_path):
    methods = "lpt-npg", "fine-tuning"
    cells = "lpt-2: LPT w/ NPG − Model Tuning"  # -0.4 on TREC
    write_runs(tmp_path, methods=methods, head="verbalizer")
    text = (tmp_path / "claims/runs.jsonl").read_text().splitlines()
    text = [s.replace("verbalizer", "classification") if "fine-tuning" in s else s for s in text]
    (tmp_path / "claims/runs.jsonl").write_text("\n".join(text) + "\n")
    (row,) = judge_claims([claim_row(b="fine-tuning", printed=cells)], tmp_path)
    assert (row["effect"], row["published"], row["verdict"]) == ("20.0000", "-0.4", "open")
    assert not row["finding"]  # task and heads are the paper's
    (row,) = judge_claims([claim_row(b="fine-tuning", printed=cells + "; task=SST-2")], tmp_path)
    assert row["finding"]  # the claim is about another task


def test_trials_that_differ_are_stated(tmp_path):
    write_runs(tmp_path)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["trials"] == ""
    change_records(tmp_path, "lpt-npg", lr=3.0, steps=150, prompt_length=5)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["trials"] == (
        "steps: 150 and 300; a: learning rate 3, outside of the paper's 0.0005 to 0.01"
    )
    assert verdicts.format_verdict(row) == (
        "seen on TREC with b, at learning rates outside of the paper's"
    )
    change_records(tmp_path, "lpt-npg", **THREE_RATES)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["trials"].startswith("learning rates tried: 3 and 1; steps: 150 and 300; ")


@pytest.mark.parametrize(
    "scores,says,more,verdict",
    [
        ((80, 60), ">", "lpt-npg", "open"),  # the better side tried more
        ((80, 60), ">", "lpt", "seen"),  # the difference can only be larger
        ((60, 80), ">", "lpt", "open"),
        ((60, 80), ">", "lpt-npg", "opposite"),
        ((80, 60), "<", "lpt-npg", "open"),
        ((80, 60), "<", "lpt", "opposite"),
        ((70, 70), ">", "lpt-npg", "not seen"),  # the claim's side had the better chance
        ((70, 70), ">", "lpt", "open"),
        ((70, 70), "<", "lpt-npg", "open"),
        ((70, 70), "=", "lpt", "open"),
        ((80, 60), "=", "lpt", "opposite"),
    ],
)
def test_a_side_with_more_learning_rates_gets_no_verdict_in_its_favour(
    scores, says, more, verdict, tmp_path
):
    write_runs(tmp_path, *scores, split_sizes=dict(test=20000))
    write_probe(tmp_path, 65.0)
    claim = claim_row(says=says, printed="", stated="")
    (equal,) = judge_claims([claim], tmp_path)
    assert equal["verdict"] != "open"
    change_records(tmp_path, more, **THREE_RATES)
    (row,) = judge_claims([claim], tmp_path)
    n_tried = (3, 1) if more == "lpt-npg" else (1, 3)
    reason = "unequal numbers of learning rates ({} and {})".format(*n_tried)
    assert (row["verdict"], row["reason"]) == (verdict, reason if verdict == "open" else "")


def test_an_interval_over_seeds_alone_gives_no_verdict(tmp_path):
    write_runs(tmp_path)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["verdict"] == "seen" and row["interval_over"] == "seeds and unpaired examples"
    assert "over seeds and unpaired examples; 5 runs" in verdicts.format_claim_effect(row)
    write_runs(tmp_path, split_sizes={})
    (row,) = judge_claims([claim_row()], tmp_path)
    reason = "the interval is over seeds alone"
    assert (row["verdict"], row["reason"], row["interval_over"]) == ("open", reason, "seeds")


@pytest.mark.parametrize(
    "control,verdict,reason",
    [
        (65.0, "not seen", ""),
        (75.0, "open", "no side scores above the control (70.2 and 70.2, control 75.0)"),
        (None, "open", "no control was run in this setting"),
    ],
)
def test_a_difference_is_not_missed_where_no_side_is_above_the_control(
    control, verdict, reason, tmp_path
):
    write_runs(tmp_path, a=70.0, b=70.0, split_sizes=dict(test=20000))
    if control:
        write_probe(tmp_path, control)
    (row,) = judge_claims([claim_row(printed="")], tmp_path)
    assert (row["verdict"], row["reason"]) == (verdict, reason)


def write_runs_with_logits(folder, n_wrong=(0, 0), task="trec", n=2000, **fields):
    """Write five seeds of NPG and a static prompt that miss the first examples."""
    labels = np.arange(n) % 2
    lines = []
    for method, missed in zip(("lpt-npg", "lpt"), n_wrong):
        for seed in range(5):
            out = np.eye(2)[labels]
            out[:missed] = out[:missed, ::-1]
            arrays = dict(test=out.astype(np.float16), test_label=labels)
            file = folder / "claims/logits/runs.npz"
            stored = write_run_arrays(file, f"{method}{seed}", arrays)
            values = dict(task=task, head="verbalizer", lr=1e-3, steps=300) | fields
            score = 100 - 100 * missed / n
            lines.append(json.dumps(record(method, seed, score, **stored, **values)))
    (folder / "claims/runs.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("n_wrong", "verdict"),
    [((0, 0), verdicts.WITHIN), ((0, 2), verdicts.WITHIN), ((0, 200), "seen")],
)
def test_a_difference_that_is_known_to_be_small_is_within_a_point(n_wrong, verdict, tmp_path):
    write_runs_with_logits(tmp_path, n_wrong)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["verdict"] == verdict and "TREC" in verdicts.format_verdict(row)
    write_runs_with_logits(tmp_path, n_wrong, task="stsb", metric="accuracy")
    (row,) = judge_claims([claim_row()], tmp_path)
    is_small = verdict == verdicts.WITHIN
    assert row["finding"] == f"{verdict if is_small else 'higher'} on STS-B with b"


def test_equal_sides_below_a_control_are_called_so(tmp_path):
    write_runs_with_logits(tmp_path, (600, 600))
    write_probe(tmp_path, 90.0)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["verdict"] == verdicts.WITHIN
    assert row["reason"] == "no side scores above the control (70.0 and 70.0, control 90.0)"


@pytest.mark.parametrize(("last", "words"), [(70.0, ""), (72.5, ", after 500 steps")])
def test_a_verdict_names_the_steps_if_a_side_was_still_learning(last, words, tmp_path):
    history = [[100, 50.0], [400, 70.0], [500, last]]
    write_runs(tmp_path, steps=500, history=history)
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["rise"] == f"{last - 70:+.1f} and {last - 70:+.1f}"
    assert verdicts.format_verdict(row) == f"seen on TREC with b{words}"


def test_a_claim_out_of_reach_is_neither_open_nor_not_run(tmp_path):
    row = claim_row(beyond="it needs MNLI", decides="")
    assert judge_claims([row], tmp_path)[0]["verdict"] == verdicts.OUT_OF_REACH
    write_runs(tmp_path)  # records decide it all the same
    assert judge_claims([row], tmp_path)[0]["verdict"] == "seen"


@pytest.mark.parametrize(("ratio", "verdict"), [(2.2, verdicts.ON_A_CPU), (0.9, "open")])
def test_a_ratio_of_times_is_seen_on_a_cpu(ratio, verdict, tmp_path):
    (tmp_path / "speed").mkdir()
    times = dict(method="lpt-npg", layer=12, cached=False, backbone="b", ratio=ratio, paper=2.0)
    (tmp_path / "speed/bench-roberta-large.jsonl").write_text(json.dumps(times) + "\n")
    row = claim_row(id="lpt-faster", a="", b="", family="")
    (judged,) = judge_claims([row], tmp_path)
    assert judged["verdict"] == verdict
    assert judged["recomputed"] == f"{ratio:.2f} (b on a CPU); the paper's table: 2.00"


def test_two_claims_on_one_contrast_are_counted_once():
    rows = [claim_row(id="1", verdict="opposite"), claim_row(id="2", verdict="opposite")]
    rows += [claim_row(id="3", b="lpt-mppg"), claim_row(id="4", a="", b="", verdict="not run")]
    rows.append(claim_row(id="5", kind="counted", verdict="agrees"))
    assert verdicts.count_contrasts(rows) == {"opposite": 1, "open": 1, "not run": 1}


def test_a_claim_without_records_is_not_run(tmp_path):
    (row,) = judge_claims([claim_row()], tmp_path)
    assert row["verdict"] == "not run"
    described = claim_row(a="", b="", family="")
    assert judge_claims([described], tmp_path)[0]["verdict"] == "not run"
    write_runs(tmp_path)  # without two sides, but with records, which `decides` describes
    assert judge_claims([described], tmp_path)[0]["verdict"] == "open"
    with pytest.raises(ValueError, match="needs a function in STATEMENT_CHECKS"):
        judge_claims([claim_row(a="", b="", kind="counted")], tmp_path)


def test_a_control_counts_only_with_the_same_few_shot_samples(tmp_path):
    row = dict(paper="LPT", a="a", b="b", keep="", records="claims/runs.jsonl")
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


def test_p_values_of_a_family_are_corrected(tmp_path):
    write_runs(tmp_path, a=65.0)
    (alone,) = judge_claims([claim_row(id="0")], tmp_path)
    many = judge_claims([claim_row(id=str(i)) for i in range(4)], tmp_path)
    assert float(many[0]["p"]) == pytest.approx(4 * float(alone["p"]), rel=0.2)


@pytest.mark.long
def test_claims_csv_agrees_with_the_records():
    """Effects, intervals and verdicts are those computed from the records."""
    rows = read_claims(CLAIMS)
    assert len(rows) >= 40 and {r["paper"] for r in rows} == {"IDPG", "LPT", "ID-SPAM"}
    notebook = json.loads((ROOT / "nbs/lab/claims.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    page = "".join("".join(o.get("data", {}).get("text/markdown", ())) for o in outputs)
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
    # a claim that cannot be decided here is open, too
    names = {verdicts.OUT_OF_REACH: "open"}
    verdict_of_claim = {r["id"]: names.get(r["verdict"], r["verdict"]) for r in read_claims(CLAIMS)}
    mismatches = [*against_row(page, verdict_of_claim)]
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


def test_examples_are_compared_only_if_the_score_is_a_mean_over_them(tmp_path):
    a = record_with_logits(tmp_path, "a")
    assert has_per_example_results(a, tmp_path)
    assert has_per_example_results({**a, "metric": "pearson+spearman"}, tmp_path)
    for other in (
        dict(metric="accuracy+f1"),
        dict(metric="f1+exact"),
        dict(task="copa"),
        dict(metric="pearson", task="copa"),
    ):
        assert not has_per_example_results({**a, **other}, tmp_path)


def test_scores_of_examples_of_a_regression_have_the_correlations_as_their_mean(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 400).astype(float)
    runs = {}
    for name, noise in (("a", 1.0), ("b", 2.0)):
        outputs = (labels + noise * rng.normal(size=400))[:, None].astype(np.float32)
        arrays = dict(test=outputs, test_label=labels)
        fields = write_run_arrays(tmp_path / "logits/runs.npz", name, arrays)
        record = dict(fields, task="stsb", metric="pearson+spearman")
        runs[name] = per_example_scores(record, tmp_path)
        expected = compute_metric("pearson+spearman", outputs[:, 0], labels)
        assert runs[name].mean() == pytest.approx(expected, abs=1e-4)
    estimate = paired_bootstrap([runs["a"][None]], [runs["b"][None]])
    assert estimate["low"] > 0


def test_constant_predictions_have_no_correlation():
    assert not correlation_by_example(np.ones(5), np.arange(5)).any()


def test_an_open_claim_needs_what_would_decide_it(tmp_path):
    row = claim_row(decides="", verdict="seen")
    with pytest.raises(ValueError, match="claim 'x' is not run with these records"):
        judge_claims([row], tmp_path)
    assert judge_claims([row | dict(decides="more seeds")], tmp_path)[0]["verdict"] == "not run"


def test_printed_cells_of_every_claim_can_be_read():
    rows = [r for r in read_claims(CLAIMS) if r["printed"]]
    assert len(rows) >= 40
    for row in rows:
        differences = printed_differences(row["printed"])
        assert differences, row["id"]
        number = re.fullmatch(r"[+-]\d+(\.\d+)?", row["stated"])
        if number and "Avg" in differences and row["id"] != "idpg-phm-dnn-m":  # it states +0.1
            assert differences["Avg"] == pytest.approx(float(number[0]), abs=0.051), row["id"]


def test_published_values_are_those_of_the_measured_tasks():
    """The values that a mean of ten tasks used to stand for."""
    published = {r["id"]: r["published"] for r in read_claims(CLAIMS)}
    expected = {
        "lpt-50": "-0.4",
        "lpt-71": "+1.2",
        "lpt-adapterdrop": "+1.7",
        "lpt-ppg-few": "-5.0",
        "lpt-late-lm": "+11.0",
        "lpt-npg": "+6.2",
        "lpt-npg-lm": "+2.4",
        "spam-zero": "+22.0",
        "idpg-m-over-prompt": "",  # IDPG has no TREC
    }
    assert {i: published[i] for i in expected} == expected


def test_rows_of_each_kind_are_counted_apart():
    rows = read_claims(CLAIMS)
    for row in rows:
        is_statement = row["kind"] != "measured here"
        assert is_statement == (row["id"] in STATEMENT_CHECKS)
        assert bool(row["recomputed"]) == (is_statement or row["id"] in verdicts.SPEED_RATIOS)
        assert is_statement == (row["verdict"] in ("agrees", "differs"))
    counts = verdicts.count_verdicts(rows)
    assert sum(sum(c.values()) for c in counts.values()) == len(rows)


# logits were kept in float16, which changed the prediction of an example or of a few: the score of
# the record, which is that of the run, differs from the accuracy of its logits, in points
FLOAT16_DIFFERENCES = {
    ("controls-mpnet", "side-network", "cr", 1): 0.05,
    ("controls-mpnet", "side-network", "qqp", 3): -0.01,
    ("few-100-minilm", "adapter", "trec", 0): 0.2,
    ("few-100-minilm", "adapter", "trec", 1): 0.2,
    ("tuned-trec-tiny", "m-idpg-phm", "trec", 0): 0.2,
    ("tuned-trec-tiny", "m-idpg-phm", "trec", 4): 0.2,
}


@pytest.mark.long
def test_records_whose_logits_give_another_score_are_listed():
    differences = {}
    for file in sorted((ROOT / "results").glob("*/*.jsonl")):
        # prompts of the playground, and measurements: no records
        if file.parent.name == "playground" or file.name.startswith("readers-"):
            continue
        for r in read_records(file):
            if "logits" not in r or "logits_before" in r or r["status"] != "done":
                continue
            if not has_per_example_results(r, file.parent, metric_name="scores.accuracy"):
                continue
            score = (r.get("scores") or {}).get("accuracy")
            if score is None:
                continue
            difference = per_example_scores(r, file.parent).mean() - score
            if abs(difference) > 1e-6:
                key = (file.stem, r["method"], r["task"], r["seed"])
                differences[key] = pytest.approx(difference)
    assert differences == FLOAT16_DIFFERENCES


@pytest.mark.parametrize(
    "text", ['{"sentence1": "a precious record"}\n', "", ",".join(CLAIM_COLUMNS) + "\n"]
)
def test_a_file_without_claims_is_not_overwritten(text, tmp_path):
    (tmp_path / "f").write_text(text)
    with pytest.raises(UserError, match="holds no claims"):
        update_claims(tmp_path / "f")
    assert (tmp_path / "f").read_text() == text
