"""The surface of the drop-in for torch's ``_state_dict_utils``: every name is there, with torch's signature."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed._state_dict_utils as peer

from fdsd.compat import _state_dict_utils as ours
from fdsd.errors import FdsdError

FUNCTIONS = sorted(
    name for name, value in vars(peer).items() if inspect.isfunction(value) and value.__module__ == peer.__name__
)
ALIASES = ["CONTAINER_TYPE", "FLATTEN_MAPPING", "OBJ_PATH", "PATH_ITEM", "STATE_DICT_TYPE"]


def test_there_are_functions() -> None:
    assert len(FUNCTIONS) >= 15


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_those_of_torch(name: str) -> None:
    """What torch takes is taken, in the same place, of the same kind, with the same default."""
    theirs = list(inspect.signature(getattr(peer, name)).parameters.values())
    mine = list(inspect.signature(getattr(ours, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in mine[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.default is not inspect.Parameter.empty for p in mine[len(theirs) :])


def spelled(alias: Any) -> str:
    return str(alias).replace("typing.", "").replace("collections.abc.", "").lower()


def test_aliases_and_classes() -> None:
    for name in ALIASES:
        mine, theirs = getattr(ours, name), getattr(peer, name)  # older versions of torch write typing.Dict
        assert mine == theirs or spelled(mine) == spelled(theirs), name
    info = ours._TensorInfo(torch.Size([2, 3]), torch.int8)
    assert info == peer._TensorInfo(torch.Size([2, 3]), torch.int8)
    assert pickle.loads(pickle.dumps(info)) == info
    assert issubclass(ours.CompanionMismatch, FdsdError)
    assert {*ALIASES, *FUNCTIONS, "CompanionMismatch", "_TensorInfo"} <= set(ours.__all__)


def test_identity_gives_the_object() -> None:
    x = torch.ones(2)
    assert ours._identity_func(x, None, None, None) is x
