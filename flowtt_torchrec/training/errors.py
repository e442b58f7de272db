"""The error that a user can cause and mend: one clear message, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong. The message names it, says what is allowed, and needs no traceback."""


class ConfigError(UserError):
    """A setting is wrong; the message starts with where it was made, like ``configs/a.yaml:12`` or ``--epochs``."""


class DivergenceError(UserError):
    """The model's numbers are not finite any more; the message says since when, and what to do."""


class CheckpointError(UserError):
    """A checkpoint cannot be used: missing parts, or made by a run that this one does not continue."""
