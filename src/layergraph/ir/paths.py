"""Paths as callers give them: refused by name before anything is read or made there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from layergraph.errors import InputError, InputTypeError, StorageError

# What a path may lack is for the reader or writer to say; these say that nothing can ever be there.
_NEVER = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def as_path(value: Any, what: str = "folder") -> Path:
    """``value`` as a path, whether or not something is there.

    Raises:
        InputTypeError: it is neither text nor a ``pathlib.Path``. InputError: it is empty, or no name of a file.
        StorageError: the file system cannot have it, or does not let this user look.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise InputTypeError(
            f"the {what} is no path", expected="a string or a pathlib.Path", found=repr(value)[:80], do="give one"
        )
    text = os.fspath(value)
    if not text or "\0" in text:
        raise InputError(f"the {what} is no path", found=repr(text)[:80], do="give the name of one")
    try:
        os.lstat(text)
    except OSError as error:
        if error.errno in _NEVER:
            raise StorageError(
                f"the {what} cannot be there",
                path=text if len(text) <= 120 else f"{text[:120]}...",
                found=error.strerror,
                do="give another path",
            ) from error
    return Path(text)


__all__ = ["as_path"]
