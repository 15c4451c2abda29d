"""``>>`` and ``pipe`` compose steps and pipelines, and nothing else."""

import fdsd

rename = fdsd.rename_fqns({"layers.{i}.{rest...}": "model.layers.{i}.{rest...}"})
drop = fdsd.drop("{_...}.bias")

both = rename >> drop
back = ~(both >> fdsd.identity)
same = fdsd.pipe(rename, drop, back)

wrong = rename >> 3  # E: operator / reportOperatorIssue
wrong = both >> "layers.0"  # E: operator / reportOperatorIssue
wrong = fdsd.identity >> fdsd.rename_fqns  # E: operator / reportOperatorIssue
wrong = fdsd.pipe(rename, None)  # E: arg-type / reportArgumentType
