"""The environment variables that expertwire reads.

EXPERTWIRE_CACHE_DIR   where compiled kernels are kept (default: expertwire below the user's cache folder)
"""

from __future__ import annotations

import os


def cache_dir(kind: str) -> str:
    """The folder for one kind of compiled kernels. Whoever writes to it creates it."""
    root = os.environ.get("EXPERTWIRE_CACHE_DIR")
    if not root:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        root = os.path.join(base, "expertwire")
    return os.path.join(root, kind)
