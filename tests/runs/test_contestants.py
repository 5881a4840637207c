"""An option that is given twice is refused by name: nobody can know which was meant."""

import pytest

import flatfed as ff
from flatfed.runs.compare import Contestant


def test_an_option_that_is_given_twice_is_named():
    for text in ("fedsam:radius=1,radius=2", "fedsam:lr=1, lr=1", "fedsam:radius=1,lr=2,radius=1"):
        with pytest.raises(ff.FlatfedError, match=r"(radius|lr) is given twice; give it once"):
            Contestant.parse(text)
    assert Contestant.parse("fedsam:radius=1,lr=2").changes["algorithm"] == {"name": "fedsam", "radius": 1}
