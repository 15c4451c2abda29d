"""Asserting that a pipeline refuses a state: on tensors, lazy tensors and specs alike, with a message that helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fdsd import Pipeline, defer, specs
from fdsd.data.errors import FdsdError
from fdsd.testing._values import Values  # noqa: F401  # so that the complex32 warning is over

__all__ = ["assert_refused"]


def assert_refused(p: Pipeline, state: Mapping[str, Any], error: type[FdsdError], *texts: str) -> None:
    """Assert the class of the error and what its message says, and that ``check`` finds it too."""
    for form in (state, specs(state), defer(state)):
        with pytest.raises(error) as caught:
            p(form)
        assert isinstance(caught.value, FdsdError)
        for text in texts:
            assert text in str(caught.value), f"{text!r} is not in: {caught.value}"
    report = p.check(state)
    assert not report.ok
    with pytest.raises(error):
        report.raise_for_problems()
