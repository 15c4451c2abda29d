"""Shared by the tests of several floors: tensors with all-different values, regions, chains of operations, oracles.

Nothing here is a test; nothing here is used by ``fdsd`` itself.
"""
