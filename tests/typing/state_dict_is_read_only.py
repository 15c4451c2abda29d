"""A state dict is a value: reading it is typed, writing to it is a type error."""

import torch

import fdsd

state = fdsd.StateDict({"layer.weight": torch.zeros(2, 3), "layer.bias": torch.zeros(2)})

weight: torch.Tensor = state["layer.weight"]
changed: fdsd.StateDict[torch.Tensor] = state.replace({"layer.bias": torch.ones(2)})
plain: dict[str, torch.Tensor] = state.to_dict()

state["layer.bias"] = torch.ones(2)  # E: index / reportIndexIssue
del state["layer.bias"]  # E: attr-defined / reportIndexIssue
state.update({"layer.bias": torch.ones(2)})  # E: attr-defined / reportAttributeAccessIssue
state.pop("layer.bias")  # E: attr-defined / reportAttributeAccessIssue
