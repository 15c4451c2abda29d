"""A verb called with wrong or missing arguments is a type error."""

import fdsd

fused = fdsd.concat(["{p...}.q.weight", "{p...}.k.weight"], "{p...}.qk.weight", dim=0, sizes=[4, 4])
moved = fdsd.add_scalar("{_...}.norm.weight", 1.0)

fdsd.concat(["{p...}.q.weight"], "{p...}.qk.weight")  # E: call-arg / reportCallIssue
fdsd.add_scalar("{_...}.norm.weight", "1")  # E: arg-type / reportArgumentType
fdsd.rename_fqns(3)  # E: arg-type / reportArgumentType
fdsd.transpose("{_...}.weight", dim2=0)  # E: call-arg / reportCallIssue
