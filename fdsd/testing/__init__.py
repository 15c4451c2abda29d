"""For unit tests of your own pipelines: random states, layouts and pipelines, and assertions of the laws.

The strategies need hypothesis (``pip install 'fdsd[testing]'``), which is imported when they are called; the
assertions need nothing. Nothing here is used by fdsd itself.
"""

from fdsd.testing.golden import assert_golden
from fdsd.testing.laws import assert_laws, assert_round_trip
from fdsd.testing.same import assert_same
from fdsd.testing.strategies import layouts, pipelines, states

__all__ = ["assert_golden", "assert_laws", "assert_round_trip", "assert_same", "layouts", "pipelines", "states"]
