"""Errors meant for people. Each carries the exit code that the command line ends with (see docs/cli.md)."""

import contextlib
import difflib
import os
from collections.abc import Iterable


class UserError(Exception):
    """Wrong usage or configuration: exit code 2."""

    exit_code = 2


class CheckFailed(UserError):
    """A check the user asked for did not hold: exit code 1."""

    exit_code = 1


class BadData(UserError):
    """Data or a checkpoint that cannot be trusted: exit code 65."""

    exit_code = 65


class MissingInput(UserError):
    """A file or a run that does not exist: exit code 66."""

    exit_code = 66


class Hung(UserError):
    """A run that no longer moved: exit code 71."""

    exit_code = 71


class StorageError(UserError):
    """Full, read-only or failing disk: exit code 74."""

    exit_code = 74


class ProcessLost(UserError):
    """Another process of the run was lost, or ended first: exit code 75 (run again to go on), or that of the other."""

    exit_code = 75

    def __init__(self, message: str, code: int = 75):
        super().__init__(message)
        self.exit_code = code


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, or lists them all when none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean {close[0]!r}?' if close else f'known names: {", ".join(known)}'


def say(text: str) -> None:
    """A line on stderr, at once, also from a signal's handler or a last thread: whether anyone hears it changes nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f'{text}\n'.encode())


def unheard(handle: int) -> None:
    """Whoever read what is written to `handle` is gone: what follows goes nowhere, and costs neither the run nor its exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
