"""How tensors lie over ranks, as values: meshes, placements, layouts, and the plan of who sends what to whom.

Everything here is arithmetic on whole numbers; no process group is known, and no data but a rehearsal's is touched.
"""

from fdsd.layout.layout import Block, Layout
from fdsd.layout.mesh import Mesh
from fdsd.layout.picture import picture
from fdsd.layout.pieces import Pieces
from fdsd.layout.placement import Replicate, Shard
from fdsd.layout.transfer import Move, Transfers, plan_transfers

__all__ = ["Block", "Layout", "Mesh", "Move", "Pieces", "Replicate", "Shard", "Transfers", "picture", "plan_transfers"]
