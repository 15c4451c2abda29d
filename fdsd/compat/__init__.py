"""Drop-ins for torch's own state-dict modules: changing the import is all that their users do. Names live in the
modules.
"""
