"""A rewrite shown without being run: step by step, which names become which, with shapes and dtypes.

Only folding and wording live here; what a step does is asked of the step, and what is wrong of ``check``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from attrs import field, frozen

from fdsd.data.errors import FdsdError, plural
from fdsd.data.naming import fold
from fdsd.data.optim import OptimState
from fdsd.data.problem import Problem
from fdsd.data.spec import TensorSpec, spec_of
from fdsd.data.statedict import StateDict
from fdsd.data.ties import tie_key
from fdsd.data.train import TrainState
from fdsd.pipeline.check import abstract, trace
from fdsd.pipeline.rewrite import UNKNOWN, Assign, Rewrite, Scope, problem_of
from fdsd.pipeline.step import Step
