"""`docs/reproduce.md` is what its script makes of the package's own data."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from idp_tutorial.utils.records import append_record, config_to_record

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("reproduce_page", ROOT / "docs/reproduce.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


@pytest.fixture(scope="module")
def text():
    return page.render_page()


def test_the_page_is_what_the_script_makes(text):
    assert text == page.FILE.read_text(encoding="utf-8"), "run `python docs/reproduce.py`"


def test_every_published_table_has_one_row(text):
    names = re.findall(r"^\| ((?:idpg|lpt|id-spam)-\w+) \|", text, re.M)
    assert sorted(names) == sorted(page.load_published_tables().table)


def test_the_number_of_tables_without_a_score_is_counted(text):
    rows = re.findall(r"^\| (?:idpg|lpt|id-spam)-\w+ \|.*\| (.+) \|$", text, re.M)
    assert f" {rows.count('not run')} of {len(rows)} " in text
    assert page.summarise_state(["not run", "LPT: 81.5 (4 runs)"]).startswith("**1 of 2 ")


def test_the_commands_of_a_table_are_printed(capsys):
    tables = page.load_published_tables()
    long = tables[tables.command.str.contains(" && ")]
    assert len(long)
    for row in long.itertuples():
        assert page.format_command(row.table, row.command).startswith("`python docs/reproduce.py")
        page.main([row.table])
        assert capsys.readouterr().out.splitlines() == row.command.split(" && ")
    with pytest.raises(SystemExit, match="no table 'lpt-99'"):
        page.main(["lpt-99"])


def test_a_published_speed_gives_the_published_time_of_a_step():
    """LPT's fine-tuning of RoBERTa-large makes 11.6 tokens in a millisecond."""
    cost = page.step_cost("fine-tuning", 24, T=256, d=1024).total
    assert page.layer_tokens_per_ms("roberta-large") / cost == pytest.approx(11.6)


def test_memory_of_late_prompts_is_that_of_lpts_tables():
    for layer, published in ((6, 13.4), (12, 10.1), (18, 6.7)):
        cfg = page.RunConfig("lpt-npg", backbone="roberta-large", layer=layer, batch_size=16)
        assert page.estimate_memory(cfg) == pytest.approx(published, abs=0.2)


def test_every_row_has_an_estimate(text):
    assert "not estimated" not in text


def test_a_table_has_the_papers_number(text):
    """Only figures are without."""
    for table in re.findall(r"^\| (\S+) \|.*\| no number printed \|", text, re.M):
        assert "-f" in table
    assert page.published_number("idpg-2", "counts") == "M-IDPG-PHM: 134K"
    assert page.published_number("id-spam-12", "counts") == (
        "ID-SPAM: RoBERTa-base 2,064,384; RoBERTa-large 3,538,944"
    )


def test_estimates_of_commands():
    command = (
        "python -m results.depth.sweep --task rte --methods lpt-npg --backbone roberta-large "
        "--prompt_length 5 "
        "--steps 10 --batch_size 16 --learning_rates 1e-3,1e-2 --seeds 5"
    )
    assert page.estimate_command(command).runs == 24 * 6
    bench = "python -m results.speed.bench --backbone roberta-large --length 256 --batch_size 16"
    assert page.estimate_command(bench).runs == 0
    assert page.estimate_command(bench).hours < 1
    # MNLI: 10 epochs of 785,404 pairs, batches of 32; all learning rates of SST-2 with one seed
    supplement = (
        "python -m results.supplement.run --method prompt-tuning --backbone roberta-large "
        "--task mnli"
    )
    passes = 785404 * 10 * page.ASSUMED_TOKENS * 75
    hours = passes / page.layer_tokens_per_ms("roberta-large") / 3.6e6
    assert page.estimate_command(supplement).hours == pytest.approx(hours, rel=0.1)
    shorter = page.estimate_command(f"{supplement} --epochs 2.5").hours
    assert shorter == pytest.approx(hours / 4, rel=0.1)
    train = "idp train --method lpt-npg --backbone runs/a --task sst2 --batch_size 32 --epochs 10"
    assert page.estimate_command(f"{train} --learning_rates 1e-3,1e-4").runs == 2
    # the table of one backbone costs what its plan costs
    part = "idp reproduce --table lpt-4 --scale full --tasks rte --backbone gpt2-large"
    assert page.estimate_command(part) == page.estimate_table("lpt-4", "gpt2-large", None, ["rte"])
    assert (
        page.estimate_command("python -m results.figures.run --figure idpg-f4 --scale full").runs
        == 5
    )


# ---- records of this project


def planned_runs(table, method, **fields):
    """Return the planned configs of a method that have some fields."""
    plan = page.plan_table_runs(table, "full", methods=[method])
    return [c for c in plan if all(c.to_dict()[name] == v for name, v in fields.items())]


def write_run(folder, table, cfg, score, lr=1e-3, seed=0, validation=80.0, **fields):
    """Append the record of a finished run with 640 training examples."""
    cfg = replace(cfg.resolve_epochs(640), lr=lr, seed=seed)
    record = dict(
        schema=3,
        status="done",
        **config_to_record(cfg),
        metric="accuracy",
        score=score,
        validation=validation,
        split_sizes=dict(train=640, validation=100, test=100),
        digests=dict(weights="0" * 16, data="0" * 16),
    )
    append_record({**record, **fields}, folder / f"{table}-full.jsonl")


def test_a_mean_over_tasks_needs_runs_of_every_task(tmp_path):
    runs = planned_runs("lpt-2", "lpt-npg")
    assert page.our_number("lpt-2", "scores", tmp_path) == "not run"
    for cfg in runs:
        if cfg.task != "rte":
            write_run(tmp_path, "lpt-2", cfg, 90.0)
    assert page.our_number("lpt-2", "scores", tmp_path) == "LPT w/ NPG: 9 of 10 tasks (36 runs)"
    for cfg in runs:
        if cfg.task == "rte":  # the mean of the tasks, not of the runs
            write_run(tmp_path, "lpt-2", cfg, 50.0)
            write_run(tmp_path, "lpt-2", cfg, 60.0, seed=1)
    assert page.our_number("lpt-2", "scores", tmp_path) == "LPT w/ NPG: 86.5 (44 runs)"


def test_other_runs_of_the_file_do_not_count(tmp_path):
    """Short runs, other methods, controls, backbones and learning rates, and diverged runs."""
    table = "id-spam-10"
    rte, mrpc = (planned_runs(table, "id-spam", task=task)[0] for task in ("rte", "mrpc"))
    for seed, score in enumerate((70.0, 72.0)):
        write_run(tmp_path, table, rte, score, seed=seed)
        macro = {"accuracy+f1": 99.0, "accuracy+macro_f1": score + 9}
        write_run(tmp_path, table, mrpc, 99.0, seed=seed, scores=macro, metric="accuracy+f1")
    expected = "ID-SPAM: 75.5 (4 runs)"  # MRPC by macro F1
    assert page.our_number(table, "scores", tmp_path) == expected
    write_run(tmp_path, table, replace(rte, epochs=None, steps=20), 1.0)
    write_run(tmp_path, table, planned_runs(table, "lpt-npg", task="rte")[0], 1.0)
    write_run(tmp_path, table, planned_runs(table, "majority", task="rte")[0], 1.0)
    write_run(tmp_path, table, replace(rte, backbone="smollm2"), 1.0)
    write_run(tmp_path, table, rte.with_options(prompt_length=20), 1.0)
    write_run(tmp_path, table, rte, 1.0, lr=5e-4, validation=99.0)
    write_run(tmp_path, table, rte, 1.0, seed=2, status="diverged", message="not finite")
    assert page.our_number(table, "scores", tmp_path) == expected


def test_the_best_validation_score_chooses_between_runs_of_one_seed(tmp_path):
    cfg = planned_runs("lpt-10", "lpt-npg", layer=12)[0]
    write_run(tmp_path, "lpt-10", cfg, 60.0, lr=1e-3, validation=70.0)
    write_run(tmp_path, "lpt-10", cfg, 50.0, lr=5e-3, validation=75.0)
    write_run(tmp_path, "lpt-10", cfg, 55.0, lr=5e-3, validation=76.0)  # the same run again
    assert page.our_number("lpt-10", "variants", tmp_path) == (
        "LPT w/ NPG at layer 13: accuracy 55.0; training speed, tokens/ms –; memory cost, GB – "
        "(1 run)"
    )


def test_scores_of_several_backbones_and_settings_are_cells_of_their_own(tmp_path):
    for cfg in planned_runs("idpg-3", "m-idpg-phm", shots=500):
        write_run(tmp_path, "idpg-3", cfg, 85.0)
    assert page.our_number("idpg-3", "scores", tmp_path) == (
        "M-IDPG-PHM: K=100 –; K=500 85.0; K=1000 – (10 runs)"
    )
    for cfg in planned_runs("lpt-4", "lpt-npg", backbone="gpt2-large"):
        write_run(tmp_path, "lpt-4", cfg, 80.0)
    assert page.our_number("lpt-4", "scores", tmp_path) == (
        "LPT w/ NPG: DeBERTa-large –; GPT2-large 80.0 (4 runs)"
    )
