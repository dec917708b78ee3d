"""Tests of ID-SPAM's attention over words; tests/methods/test_id_spam.py has more."""

import torch
from torch.testing import assert_close

from idp_tutorial.methods.token_attention import TokenAttention

mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_a_weight_is_the_mean_over_the_queries_of_a_text():
    torch.manual_seed(0)
    pool = TokenAttention(8)
    E = torch.randn(2, 4, 8)
    with torch.no_grad():
        weights = pool.token_weights(E, mask)
        assert (weights[mask == 0] == 0).all()
        assert_close(weights.sum(1), torch.ones(2))
        for i, n in enumerate(mask.sum(1)):
            x = E[i, :n]
            rows = (pool.q(x) @ pool.k(x).T / 8**0.5).softmax(1)
            assert_close(weights[i, :n], rows.mean(0))
            assert_close(pool(E, mask)[i], (rows @ pool.v(x)).mean(0))


def test_the_order_of_the_words_has_no_effect():
    pool = TokenAttention(8)
    E = torch.randn(1, 4, 8)
    order = torch.tensor([2, 0, 3, 1])
    assert_close(pool(E[:, order], mask[:1]), pool(E, mask[:1]))
