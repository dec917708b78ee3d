"""The data of the lab's first page, on records whose differences are known."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from idp_tutorial.reproduction.papers.what_works import (
    CONTRASTS,
    LANGUAGE_MODEL,
    PUBLISHED,
    SETTINGS,
    contrast_table,
    draw_contrasts,
    interaction_table,
    score_table,
)
from idp_tutorial.runs.logits import write_run_arrays

CLAIMS = Path(__file__).resolve().parents[3] / "results/claims.csv"
N = 60
ACCURACY = {"m-idpg-phm": 0.8, "prompt-tuning": 0.7, "s-idpg-phm": 0.7, "lpt": 0.6, "lpt-npg": 0.9}


@pytest.fixture
def records(tmp_path):
    """Two seeds of every method in every setting; M-IDPG gains less with the probe's head."""
    stored_records = []
    for method, accuracy in ACCURACY.items():
        for setting in SETTINGS.values():
            loss = 0.1 * (method == "m-idpg-phm" and setting["head_init"] == "probe")
            logits = np.zeros((N, 2), np.float32)
            logits[:, 1] = np.where(np.arange(N) < (accuracy - loss) * N - 0.5, -1, 1)
            for seed in range(2):
                run = f"{method}-{seed}-{setting['head_init']}-{setting['head_lr']}"
                arrays = dict(test=logits, test_label=np.zeros(N, int))
                stored = write_run_arrays(tmp_path / "logits/runs.npz", run, arrays)
                stored_records.append(
                    dict(method=method, task="subj", seed=seed, **setting, **stored)
                )
    return stored_records


@pytest.mark.skipif(not CLAIMS.exists(), reason="results/claims.csv is not in this installation")
def test_contrasts_stand_beside_the_published_ones(records, tmp_path):
    table = contrast_table(records, tmp_path, CLAIMS).set_index(["contrast", "setting"])
    published = table.xs(PUBLISHED, level="setting").effect
    # IDPG's Table 1 has Subj alone, LPT's Table 1 TREC and Subj
    assert published["M-IDPG − prompt tuning"] == pytest.approx(97.5 - 95.5)
    assert published["late − input (static)"] == pytest.approx((95.1 - 93.9 + 89.7 - 86.4) / 2)
    random, _, probe, _ = SETTINGS
    assert table.effect["M-IDPG − prompt tuning", random] == pytest.approx(10)
    assert table.effect["M-IDPG − prompt tuning", probe] == pytest.approx(0)
    assert table.effect["NPG − static (both late)", LANGUAGE_MODEL] == pytest.approx(7.32)
    assert len(draw_contrasts(table.reset_index()).axes) == len(CONTRASTS)
    plt.close("all")


def test_interactions_and_scores_of_a_factorial(records, tmp_path):
    interactions = interaction_table(records, tmp_path).set_index("contrast").effect
    assert [*interactions["M-IDPG − prompt tuning"]] == pytest.approx([10, 10])
    assert [*interactions["NPG − prompt tuning"]] == pytest.approx([0, 0])
    scores = score_table(records, tmp_path)
    assert [*scores.loc[("Subj", "m-idpg-phm")]] == pytest.approx([80, 80, 70, 70])
    assert [*scores.loc[("Subj", "lpt")]] == pytest.approx([60] * 4)
