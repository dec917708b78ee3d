"""DeBERTa with its own head and with absolute positions."""

import torch
from small_layers import backbone, library_output, make_batch

from idp_tutorial.core.loop import run_layers


def test_deberta_with_its_own_head_and_absolute_positions():
    bb = backbone("deberta", "eager", legacy=False, position_biased_input=True, type_vocab_size=2)
    batch = make_batch(bb, (9, 4), is_pair=True)
    real = batch["attention_mask"] == 1
    want = library_output(bb, batch)
    h = run_layers(bb, batch).h
    torch.testing.assert_close(h[real], want.hidden_states[-1][real], atol=1e-6, rtol=0)
    torch.testing.assert_close(bb.lm_logits(h)[real], want.logits[real], atol=1e-5, rtol=1e-6)
