"""One family of errors. Each says what was wrong with which input, and what to do about it.

Every class carries the process exit code and the HTTP status it stands for, so that the command line and the
server agree without a table of their own.
"""

from __future__ import annotations

from typing import ClassVar


class StapesError(Exception):
    """Something a user can understand and mend. ``str(error)`` is one sentence that names the input and the remedy."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500


class AudioError(StapesError):
    """An input could not be read as audio: missing, empty, not audio, damaged beyond use, or without samples."""

    http_status = 415


class OutputError(StapesError):
    """A result could not be written (no permission, disk full, the folder is a file)."""


class UsageError(StapesError):
    """An option or an argument does not make sense, alone or with the others or with this model."""

    exit_code = 2
    http_status = 400


class ModelError(StapesError):
    """A model is unknown, not here, or damaged."""

    exit_code = 3
    http_status = 404


class CancelledError(StapesError):
    """A call was given up by whoever made it."""

    exit_code = 130
    http_status = 499


class DeviceError(StapesError):
    """The device asked for does not exist or cannot run this."""

    exit_code = 3
    http_status = 503
