"""Small models of all families."""

from idp_tutorial.families.family import FAMILIES
from idp_tutorial.testing.small_models import SMALL_CONFIGS


def test_every_family_has_a_small_model():
    assert {n.partition(",")[0] for n in SMALL_CONFIGS} == set(FAMILIES) and len(FAMILIES) == 19
