"""The verbs that users compose; each is a step with the rule of what it does and how it is undone."""

from fdsd.transforms.cast import cast
from fdsd.transforms.choose import combine, drop, filter_frozen, partition, select
from fdsd.transforms.concat import concat, split
from fdsd.transforms.dims import permute, reshape, transpose
from fdsd.transforms.functions import add_scalar, map_tensors
from fdsd.transforms.insert import insert
from fdsd.transforms.local import from_shards, local_shards
from fdsd.transforms.merge import average, lerp
from fdsd.transforms.names import add_prefix, drop_prefix, rename_fqns, strip_wrappers
from fdsd.transforms.optim import flatten_optim, unflatten_optim
from fdsd.transforms.rope import permute_rope
from fdsd.transforms.rows import crop, index_select, pad
from fdsd.transforms.shard import gather, reshard, shard_with
from fdsd.transforms.stack import stack, unstack
from fdsd.transforms.ties import tie, untie

__all__ = [
    "add_prefix",
    "add_scalar",
    "average",
    "cast",
    "combine",
    "concat",
    "crop",
    "drop",
    "drop_prefix",
    "filter_frozen",
    "flatten_optim",
    "from_shards",
    "gather",
    "index_select",
    "insert",
    "lerp",
    "local_shards",
    "map_tensors",
    "pad",
    "partition",
    "permute",
    "permute_rope",
    "rename_fqns",
    "reshape",
    "reshard",
    "select",
    "shard_with",
    "split",
    "stack",
    "strip_wrappers",
    "tie",
    "transpose",
    "unflatten_optim",
    "unstack",
    "untie",
]
