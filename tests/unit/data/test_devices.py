"""Devices as users give them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fdsd
from fdsd.data.devices import parse_device
from fdsd.errors import Unsupported

STATE = {"w": torch.ones(2)}


@pytest.mark.parametrize("given", [None, "cpu", "meta", torch.device("cpu")])
def test_devices_that_are_here(given: Any) -> None:
    assert parse_device("verb", given) == (None if given is None else torch.device(given))


@pytest.mark.parametrize("given", ["gpu", "xla:3", torch.float16, 1.5])
@pytest.mark.parametrize(
    "verb, call",
    [
        ("materialize", lambda device: fdsd.materialize(STATE, device=device)),
        ("stream", lambda device: fdsd.stream(STATE, device=device)),
        ("snapshot", lambda device: fdsd.snapshot(STATE, device=device)),
        ("restore", lambda device: fdsd.restore(STATE, torch.nn.Linear(1, 1), device=device)),
    ],
)
def test_devices_that_are_not_here(verb: str, call: Any, given: Any) -> None:
    with pytest.raises(Unsupported, match=re.escape(f"{verb}: no tensor can be on device={given!r} here (")):
        call(given)
