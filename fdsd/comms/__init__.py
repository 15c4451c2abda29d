"""Live models, optimizers and process groups: the edge where ``torch.distributed`` is known.

Its modules are imported by those who need one of them, never by ``import fdsd``.
"""
