"""When a name may be asked of the Hub: only where it plainly is an id there, and no folder that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from layergraph.errors import MissingFileError

# owner/name, in the letters that the Hub allows. Names without an owner are those of a few old models.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: Any) -> bool:
    """Whether ``source`` is ``owner/name`` and its first half no folder here, in which the second was meant to be."""
    return isinstance(source, str) and bool(_ID.fullmatch(source)) and not Path(source).parent.exists()


def check_source(source: str, pass_name: str) -> None:
    """Refuse what is neither a folder here nor an id of the Hub, before anything is asked of the network.

    Raises:
        MissingFileError: names the folder that is not there.
    """
    path = Path(source)
    if path.is_dir() or is_hub_id(source):
        return
    raise MissingFileError(
        "this is a file, not a folder" if path.exists() else "no such folder",
        pass_name=pass_name,
        path=source,
        expected="a folder that save_pretrained wrote, or owner/name on the Hub",
        do="check the path",
        shell="check the path; one that is on a hub must be downloaded first, since nothing is downloaded here",
    )


__all__ = ["check_source", "is_hub_id"]
