"""A part of a table can be run, resumed and compared with the paper."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from small import small_task

from idp_tutorial.backbones.sizes import FULL_SCALE_CONFIGS
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import CONTROL_METHODS
from idp_tutorial.reproduction.papers import protocols as P
from idp_tutorial.reproduction.papers import reproduce as R
from idp_tutorial.reproduction.papers.protocols import (
    BACKBONE_NAMES,
    STATIC_PROMPT_LEARNING_RATES,
    select_paper_learning_rates,
)
from idp_tutorial.reproduction.papers.published_scores import (
    load_published_scores,
    load_published_tables,
)
from idp_tutorial.runs.logits import write_run_arrays
from idp_tutorial.utils.checks import MissingFileError
from results import find_command, split_command
from results.claims.decision import has_enough_runs

TABLES = load_published_tables()


@pytest.fixture
def small_tasks(monkeypatch):
    """Every task has forty rows."""

    def load_config_task(cfg):
        task = TASKS[cfg.task]

        def rows(n):
            labels = [*range(len(task.labels))] or [0.0, 2.5, 5.0]
            return [
                dict(
                    sentence1=f"a film {i}", sentence2="it was good", label=labels[i % len(labels)]
                )
                for i in range(n)
            ]

        return replace(task, splits=dict(train=rows(24), validation=rows(8), test=rows(8)))

    monkeypatch.setattr(R, "load_config_task", load_config_task)


@pytest.mark.grid
@pytest.mark.parametrize("table", ["idpg-7", "lpt-10", "id-spam-16"])
def test_a_table_runs_from_end_to_end(table, small_tasks, small_folder, tmp_path, messages):
    """The part has one task and one method in all its variants, with one training step."""
    small = R.plan_table_runs(table)
    tasks = {c.task for c in small}
    task = next(t for t in ("sst2", "rte", "mrpc") if t in tasks)
    methods = [*dict.fromkeys(c.method for c in small if c.method not in ("efl", "fine-tuning"))][
        :1
    ]

    def run():
        return R.reproduce_table(
            table,
            backbone=str(small_folder),
            methods=methods,
            tasks=[task],
            seeds=1,
            learning_rates=(1e-3,),
            steps=1,
            out=tmp_path,
        ).dropna(subset="our mean")

    compared = run()
    file = tmp_path / f"{table}-small.jsonl"
    assert len(compared) and compared["our mean"].between(-100, 100).all()
    assert file.is_file()
    before = file.read_text()
    messages.clear()
    run()
    # nothing is trained again
    assert file.read_text() == before and all("minutes left" in s for s in messages)


SIZES = {*FULL_SCALE_CONFIGS, *BACKBONE_NAMES.values()}


@pytest.mark.parametrize("row", [*TABLES.itertuples()], ids=lambda r: r.table)
def test_the_command_of_a_table_can_be_parsed(row):
    """Its options, tasks, models and methods exist; a command for a large model names it."""
    for one in row.command.split(" && "):
        name, argv = split_command(one)
        command = find_command(name)
        defaults = {key: option.default for key, option in command.options().items()}
        o = defaults | command.parse(argv)
        assert "--backbone" in argv or o.get("scale") == "full" or o.get("published")
        backbone = o.get("backbone")  # a folder: the first stage of supplementary training
        assert backbone is None or backbone in SIZES or backbone.startswith("runs/")
        assert {o.get("task") or "rte", o.get("source") or "rte", o.get("target") or "rte"} <= {
            *TASKS
        }
        assert o.get("methods") in (None, "all") or {*o["methods"].split(",")} <= {*METHODS}
        if name == "sweep":
            assert "--task" in argv and o["task"] in ("trec", "rte", "mrpc")
        if name == "transfer":
            assert {"--source", "--target"} <= {*argv} and o["source"] != o["target"]
            assert o["prompt_length"] == 10
        if row.table.startswith("id-spam") and name in ("sweep", "transfer", "bench"):
            # ID-SPAM's LPT has a bottleneck of 256
            assert ("lpt-npg" in o["methods"]) == ("--bottleneck 256" in one)
            assert o["methods"] == "lpt-npg" or "lpt-npg" not in o["methods"]
        if name == "reproduce":
            part = [o[name] and o[name].split(",") for name in ("methods", "tasks")]
            plan = R.plan_table_runs(o["table"], o["scale"], o["backbone"], None, *part)
            assert bool(o["glove"]) == ("m-idpg-phm-glove" in {c.method for c in plan})
        if name == "bench" and row.table in ("lpt-5", "lpt-f1"):
            assert o["length"] == 256


PROTOCOL_OPTIONS = (
    "batch_size",
    "weight_decay",
    "no_decay_on_bias_and_norm",
    "dropout_below_prompt",
    "beta2",
    "eps",
    "clip",
    "warmup",
    "schedule",
    "head",
    "two_layer_head",
    "max_len",
)


@pytest.mark.parametrize(
    "table",
    ["lpt-f2", "lpt-f4", "lpt-f5", "id-spam-f2", "id-spam-6", "id-spam-11", "idpg-f7b"],
)
def test_a_printed_command_has_the_options_of_its_paper(table):
    """The commands of figures and of transfer train as the plan of a table of the same paper."""
    for one in TABLES.set_index("table").command[table].split(" && "):
        name, argv = split_command(one)
        if name == "supplement":  # its defaults are the paper's: test_supplement.py
            continue
        command = find_command(name)
        given = command.parse(argv)
        options = {key: option.default for key, option in command.options().items()} | given
        methods = [options["method"]] if name == "train" else options["methods"].split(",")
        task = options["source"] if name == "transfer" else options["task"]
        for method in methods:
            fields = P.paper_method_fields(method, table)
            backbone = "roberta-large" if "runs/" in options["backbone"] else options["backbone"]
            cfg = P.build_paper_config(table, method, task, "full", None, backbone, **fields)
            assert {n: options[n] for n in PROTOCOL_OPTIONS} == {
                n: getattr(cfg, n) for n in PROTOCOL_OPTIONS
            }
            if cfg.head == "classification":
                assert options["pooling"] == cfg.pooling == "cls"
            assert options["sentence_pooling"] == cfg.get("sentence_pooling") or name != "train"
            rates = tuple(float(lr) for lr in options["learning_rates"].split(","))
            if method != "fine-tuning":
                assert rates == P.select_paper_learning_rates(table, method)


def test_a_transfer_table_has_a_command_for_each_of_its_pairs():
    for table in ("id-spam-6", "id-spam-11"):
        command = TABLES.set_index("table").command[table]
        printed = {tuple(pair.split("->")) for pair in load_published_scores(table).task}
        pairs = {tuple(P.TASK_NAMES.get(t, t.lower()) for t in pair) for pair in printed}
        commands = [shlex.split(one) for one in command.split(" && ")]
        assert {
            (a[a.index("--source") + 1], a[a.index("--target") + 1]) for a in commands
        } == pairs and len(commands) == 2 * len(pairs)


@pytest.mark.parametrize("kw", [dict(data="no-tasks"), dict(backbone="no-model")], ids=str)
def test_a_table_that_cannot_run_creates_no_folder(kw, request, tmp_path):
    if "data" not in kw:
        request.getfixturevalue("small_tasks")
    kw = {option: str(tmp_path / name) for option, name in kw.items()}
    with pytest.raises((ValueError, OSError), match="no-"):
        R.reproduce_table("lpt-2", **{"backbone": "tiny", **kw}, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def values(runs, *names):
    return {tuple(getattr(c, n) for n in names) for c in runs}


def test_full_tries_the_papers_learning_rates(monkeypatch, tmp_path):
    tried = {}

    def run_seeds(cfg, task, lr_selection, seeds, store, learning_rates=()):
        tried[cfg.method] = learning_rates
        return []

    monkeypatch.setattr(R, "run_seeds", run_seeds)
    monkeypatch.setattr(R, "load_config_backbone", lambda c: None)
    monkeypatch.setattr(
        R, "load_config_task", lambda cfg: SimpleNamespace(splits=dict(train=[0] * 100))
    )

    def run(table, **kw):
        tried.clear()
        R.reproduce_table(table, out=tmp_path, **kw)
        return dict(tried)

    with pytest.raises(ValueError, match="glove.6B.300d"):
        run("idpg-3", scale="full", tasks=["rte"])
    full = run("idpg-3", scale="full", tasks=["rte"], glove="glove")
    assert (
        full["m-idpg-phm"] == (5e-4, 1e-4, 5e-5, 1e-5)
        and full["efl"] == (1e-5, 2e-5, 3e-5)
        and full["probe"] == ()
    )
    assert run("idpg-1", scale="full", tasks=["rte"], glove="glove")["compacter"] == (
        5e-3,
        1e-3,
        5e-4,
        1e-4,
    )
    assert run("lpt-2", scale="full", tasks=["rte"])["lpt"] == (5e-4, 1e-3, 5e-3, 1e-2)
    assert len(run("idpg-6", scale="full", tasks=["rte"])["m-idpg-phm"]) == 9
    assert run("id-spam-3", scale="full", tasks=["rte", "mrpc"])["id-spam"] == (
        1e-3,
        5e-4,
        1e-4,
        5e-5,
        1e-5,
    )
    small = run("lpt-2", tasks=["rte"])
    assert small.pop("lpt") == STATIC_PROMPT_LEARNING_RATES and small["probe"] == ()
    assert all(
        tried == METHODS[m].learning_rates for m, tried in small.items() if m not in CONTROL_METHODS
    )
    given = run("lpt-2", scale="full", tasks=["rte"], learning_rates=(1e-3, 2e-3))
    assert given["lpt"] == (1e-3, 2e-3) and given["side-network"] == ()
    assert select_paper_learning_rates("lpt-1", "fine-tuning") != select_paper_learning_rates(
        "lpt-1", "lpt"
    )


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("table", ["idpg-1", "idpg-3", "lpt-1", "lpt-2", "id-spam-2"])
def test_the_default_number_of_runs_is_enough_for_a_verdict(table, scale):
    """Five seeds, or two for each of four splits; and every split has its controls."""
    plan = R.plan_table_runs(table, scale)
    for m in {c.method for c in plan}:
        for t in {c.task for c in plan if c.method == m}:
            runs = [c for c in plan if (c.method, c.task) == (m, t)]
            split_seeds = {c.split_seed for c in runs}
            n = {R.choose_seed_count(c, plan) for c in runs}
            assert len(n) == 1 and has_enough_runs(
                dict(runs=n.pop() * len(split_seeds), draws=len(split_seeds))
            )

    def where(*methods):
        return values(
            [c for c in plan if c.method in methods], "task", "backbone", "shots", "split_seed"
        )

    assert where("majority") == where("side-network") == where(*METHODS)
    large = {w for w in where(*METHODS) if w[0] in ("qqp", "mnli") and w[2] is None}
    assert where("probe") == where(*METHODS) - large
    one = "efl" if "idpg" in table else "lpt-npg"
    assert {c.method for c in R.plan_table_runs(table, scale, methods=[one])} == {one}


def test_a_record_counts_for_the_cell_of_its_variant():
    """Records with another bottleneck or another number of examples do not count."""
    line = dict(
        status="done",
        method="m-idpg-phm",
        task="sst2",
        shots=1000,
        score=50.0,
        backbone="minilm",
        parameter_sharing="M",
        bottleneck=16,
        prompt_length=5,
        generator_input="previous",
    )
    ours = R.compare_with_published([line], "idpg-6").dropna(subset="our mean")
    assert [*ours.method] == ["M-IDPG-PHM M version m=16"] and "previous" in ours.setting.iloc[0]
    few_shot = R.compare_with_published(
        [dict(line, shots=500, generator_input="layer0")], "idpg-3"
    ).dropna(subset="our mean")
    assert [*few_shot.setting] == ["K=500"] and R.compare_with_published(
        [dict(line, shots=500)], "idpg-3"
    )["our mean"].isna().all()


def test_a_decoders_prompt_is_in_front_and_its_record_matches_its_cell():
    plan = R.plan_table_runs(
        "idpg-1", "small", "smollm2", methods=["prompt-tuning"], tasks=["mrpc"]
    )
    cells = [
        c
        for c in P.load_table_cells("idpg-1").itertuples()
        if (c.ours, c.name) == ("prompt-tuning", "mrpc")
    ]
    assert plan[0].get("position") == 0 and all(c.fields["position"] == 1 for c in cells)
    assert any(R._matches_cell({**plan[0].to_dict(), "score": 70.0}, c) for c in cells)


def matching_methods(table, **r):
    """Return the methods of a table whose RTE cell a record counts for."""
    shared = dict(status="done", task="rte", backbone="bb", n_layers=12, score=50.0, shots=None)
    r = shared | r
    return [*R.compare_with_published([r], table).dropna(subset="our mean").method]


def test_a_score_is_not_compared_with_a_time_or_memory():
    plan = P.plan_table_runs("lpt-10", "full")
    records = [dict(cfg.to_dict(), status="done", n_layers=24, score=50.0) for cfg in plan]
    table = R.compare_with_published(records, "lpt-10").dropna(subset="metric")
    assert table.metric.nunique() == 3
    assert {*table.metric[table["our mean"].notna()]} == {"accuracy"}


def test_one_method_at_the_input_and_at_the_middle_layer_is_two_rows():
    assert matching_methods("lpt-1", method="lpt", layer=0, prompt_length=20) == ["Prompt Tuning"]
    assert matching_methods("lpt-1", method="lpt", layer=0, prompt_length=256) == [
        "Prompt Tuning-256"
    ]
    assert (
        matching_methods("lpt-1", method="lpt", layer=None, prompt_length=20)
        == matching_methods("lpt-1", method="lpt", layer=6, prompt_length=20)
        == ["LPT w/o PG"]
    )
    assert (
        matching_methods("lpt-1", method="lpt", layer=3, prompt_length=20)
        == matching_methods("lpt-1", method="prompt-tuning", prompt_length=20)
        == []
    )
    assert matching_methods("lpt-1", method="s-idpg-phm", prompt_length=5) == [
        "S-IDPG-PHM"
    ] and not matching_methods("lpt-1", method="s-idpg-phm", prompt_length=20)
    assert matching_methods("id-spam-2", method="lora-all") == [
        "LoRA"
    ] * 2 and not matching_methods("id-spam-2", method="lora")
    assert (
        matching_methods("id-spam-2", method="lpt-npg", bottleneck=256, prompt_length=10)
        == ["LPT"] * 2
    )
    assert not matching_methods(
        "id-spam-2", method="lpt-npg", prompt_length=10
    ) and not matching_methods("id-spam-2", method="lpt-npg", bottleneck=256, prompt_length=5)
    assert matching_methods("idpg-1", method="probe") == ["probe"]


def test_a_score_is_of_the_metric_and_the_backbone_of_its_cell():
    r = dict(
        status="done",
        method="id-spam",
        task="mrpc",
        prompt_length=10,
        shots=None,
        score=90.0,
        backbone="roberta-base",
        scores={"accuracy+f1": 90.0, "accuracy+macro_f1": 70.0},
    )
    table = R.compare_with_published(
        [r, dict(r, backbone="roberta-large", scores={"accuracy+macro_f1": 71.0})], "id-spam-2"
    )
    scores = table.dropna(subset="our mean").set_index("backbone")["our mean"]
    assert dict(scores) == {"RoBERTa-base": 70.0, "RoBERTa-large": 71.0}
    assert R.compare_with_published([r], "id-spam-2")["our mean"].notna().sum() == 1
    s = dict(
        status="done",
        method="lpt-npg",
        task="mrpc",
        prompt_length=5,
        shots=None,
        score=90.0,
        backbone="bb",
        scores={"accuracy+macro_f1": 70.0},
    )
    assert R.compare_with_published([s], "lpt-1")["our mean"].dropna().tolist() == [90.0]
    curve = R.compare_with_published(
        [dict(r, method="lora-all", losses=[float(n) for n in range(50)])], "id-spam-16"
    )
    assert curve.dropna(subset="our mean")["our mean"].tolist() == [
        8.0,
        16.0,
        24.0,
        33.0,
        41.0,
        49.0,
    ]
    assert curve.dropna(subset="our mean")["mean"].tolist() == [
        0.21,
        0.12,
        0.05,
        0.02,
        0.02,
        0.0001,
    ]


def test_five_runs_vote_where_table_7_votes(tmp_path):
    """IDPG's Table 7 has a mean of five runs and their vote; ours uses stored logits."""
    right = np.array([0, 1, 0, 1])

    def run(seed, error):  # index of the example that is misclassified
        answers = np.eye(2, dtype=np.float16)[np.where(np.arange(4) == error, 1 - right, right)]
        arrays = dict(test=answers, test_label=right)
        fields = write_run_arrays(tmp_path / "logits/runs.npz", str(seed), arrays)
        return dict(
            status="done",
            method="s-idpg-phm",
            task="mr",
            shots=1000,
            score=75.0,
            metric="accuracy",
            backbone="minilm",
            prompt_length=5,
            seed=seed,
            **fields,
            folder=tmp_path,
        )

    runs = [run(s, s % 4) for s in range(5)]
    table = (
        R.compare_with_published(runs, "idpg-7")
        .query("task=='mr' and method=='PHM'")
        .set_index("metric")["our mean"]
    )
    assert dict(table) == {"average over 5 runs": 75.0, "voting over 5 runs": 100.0}
    without = [{k: v for k, v in r.items() if k != "logits"} for r in runs]
    alone = R.compare_with_published(without, "idpg-7")
    assert alone[alone.metric.eq("voting over 5 runs")]["our mean"].isna().all()
    with pytest.raises(MissingFileError, match="runs.npz is missing"):
        R.compare_with_published([dict(r, folder=tmp_path / "elsewhere") for r in runs], "idpg-7")


def test_a_part_of_a_table_reports_progress_and_scores(monkeypatch, tmp_path, messages):
    ran = []

    def run_seeds(cfg, task, lr_selection, seeds, store, learning_rates=()):
        ran.append(cfg)
        same = dict(
            status="done",
            method=cfg.method,
            task=cfg.task,
            shots=cfg.shots,
            backbone=cfg.backbone,
            prompt_length=cfg.get("prompt_length"),
            bottleneck=cfg.get("bottleneck"),
            layer=cfg.get("layer"),
        )
        return [dict(same, seed=s, score=60.0) for s in range(seeds)]

    monkeypatch.setattr(R, "run_seeds", run_seeds)
    monkeypatch.setattr(R, "load_config_backbone", lambda c: None)
    monkeypatch.setattr(R, "load_config_task", lambda cfg: SimpleNamespace(splits=dict(train=[])))
    t = R.reproduce_table("lpt-2", methods=["lpt-npg"], tasks=["sst2"], out=tmp_path)
    row = t.dropna(subset="our mean").iloc[0]
    assert (
        (row["mean"], row["our mean"], row.runs) == (92.7, 60.0, 8)
        and len(ran) == 4
        and "0 minutes left" in messages[-1]
    )
    assert ran[1] == replace(ran[0], split_seed=1)
    with pytest.raises(ValueError, match="no run of lpt-2 matches"):
        R.reproduce_table("lpt-2", methods=["smop"], out=tmp_path)
    with pytest.raises(ValueError, match="did you mean 'lpt-2'"):
        R.plan_table_runs("lpt2")


def test_a_choice_at_the_edge_of_a_grid_is_recorded(monkeypatch):
    """Each method tries the same learning rates."""
    from idp_tutorial.assembly.config import RunConfig
    from idp_tutorial.runs.experiment import Experiment
    from idp_tutorial.runs.learning_rate_search import search_learning_rate
    from idp_tutorial.runs.record import build_record
    from idp_tutorial.training.fit import TrainLog

    best = {}

    def fit_quickly(self, checkpoint_dir=None):
        return None, TrainLog(-abs(self.cfg.lr - best["lr"]))

    monkeypatch.setattr(Experiment, "fit", fit_quickly)
    monkeypatch.setattr(
        Experiment, "score", lambda self, *args: build_record(self.cfg, {}, {}, 0.0)
    )
    grid = METHODS["lpt"].learning_rates
    for best["lr"], edge in ((grid[-1], True), (grid[1], False)):
        r = search_learning_rate(RunConfig("lpt"), small_task())
        assert (r["lr"], r["lr_at_grid_edge"]) == (best["lr"], edge)
        assert [lr for lr, _ in r["learning_rates_tried"]] == [*grid]


def test_a_layer_is_at_the_same_fraction_of_any_depth(tmp_path):
    (tmp_path / "config.json").write_text('{"n_layer": 12}')
    assert (
        R.scale_to_backbone(dict(layer=12), str(tmp_path))
        == R.scale_to_backbone(dict(layer=12), "bb", 12)
        == dict(layer=6)
    )
    assert [
        R.scale_to_backbone(dict(layer=12), name)["layer"]
        for name in ("tiny-gpt2", "roberta-large")
    ] == [4, 12]
    cells = R.load_table_cells("lpt-10")
    c = cells[[f.get("layer") not in (None, 0) for f in cells.fields]].iloc[0]
    for depth, runs in ((12, 1), (6, 0)):  # a record says how deep its model was
        r = dict(
            method=c.ours, task=c["name"], backbone="bb", n_layers=12, score=50.0, status="done"
        )
        r |= (
            c.fields
            | R.scale_to_backbone(c.fields, "bb", depth)
            | dict(shots=R.parse_shots(c.setting))
        )
        compared = R.compare_with_published([r], "lpt-10").runs
        assert compared.notna()[c.name] == bool(runs)


@pytest.mark.parametrize(
    "kw", [dict(seeds=0), dict(steps=-1), dict(methods=["lpt", "lpt-ngp"])], ids=str
)
def test_invalid_numbers_and_names_are_refused(kw, tmp_path):
    with pytest.raises(ValueError, match="at least 1|did you mean"):
        R.reproduce_table("lpt-2", backbone="tiny", **kw, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
