"What idp_predict writes, and what idp_transfer's label map says."
import io
import json
import math

import pytest

from idp_tutorial.commands.predict import writer
from idp_tutorial.commands.transfer import label_pairs


def test_what_json_has_no_number_for():
    to = io.StringIO()
    writer(to, 'jsonl')(dict(size=math.nan, sizes=[1., dict(a=math.nan)], n=3))
    assert json.loads(to.getvalue())==dict(size=None, sizes=[1., dict(a=None)], n=3)
    with pytest.raises(ValueError, match="column 'size' holds infinity"): writer(to, 'jsonl')(dict(size=[math.inf]))


def test_no_column_of_the_table_is_replaced():
    with pytest.raises(ValueError, match="'probability yes' of its own"):
        writer(io.StringIO(), 'csv')({'probability yes':'1', 'probabilities':dict(yes=.5)})


def test_a_label_map_of_an_option():
    assert label_pairs(' a = b,c=b ')==dict(a='b', c='b') and label_pairs(None) is None
    with pytest.raises(ValueError, match="'a' stands there twice"): label_pairs('a = b,a=c')
    with pytest.raises(ValueError, match="'b' is no pair"): label_pairs('a=c,b')
