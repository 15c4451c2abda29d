"""The collector rests within, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from fdsd.data.collecting import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
