"""Which core runs: the compiled one (docs/core.md), or Python alone.

The environment variable RDMACM_CORE decides: ``auto`` (the default) is the compiled core if it is installed; ``c``
demands it; ``python`` refuses it.
"""

from __future__ import annotations

import errno
import os
from importlib import import_module
from types import ModuleType

from rdmacm.errors import cm_error

#: The environment variable that decides.
ENVIRONMENT = "RDMACM_CORE"
_MODULE = "rdmacm.proto._core"


def _find() -> tuple[ModuleType | None, str]:
    """The module, or None and why Python runs alone.

    :raises RdmaError: EINVAL if RDMACM_CORE has another value, ENOENT if it demands a core that cannot be loaded
    """
    wanted = os.environ.get(ENVIRONMENT) or "auto"
    if wanted == "python":
        return None, f"{ENVIRONMENT} is python"
    if wanted not in ("auto", "c"):
        text = f"no core {wanted!r} (from the environment variable {ENVIRONMENT})"
        raise cm_error(errno.EINVAL, text, "core", hint="one of: auto, c, python")
    try:
        return import_module(_MODULE), ""
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == _MODULE
        why = "it is not installed" if is_absent else f"it cannot be loaded: {error}"
        if wanted == "c":
            text = f"{ENVIRONMENT} demands the compiled core, and {why}"
            build = "building it: python3 dev.py core in the sources; or installing with RDMACM_BUILD_CORE=require"
            hint = build if is_absent else f"{ENVIRONMENT}=auto"
            raise cm_error(errno.ENOENT, text, "core", hint=hint) from error
        return None, why


#: The module of the compiled core; None where Python runs alone.
compiled: ModuleType | None
compiled, _why = _find()
#: "c" or "python".
name: str = "python" if compiled is None else "c"


def description() -> str:
    """What runs, for a line of text."""
    if compiled is None:
        return f"without the compiled core ({_why})"
    return f"with the compiled core (CRC: {compiled.CRC32_METHOD})"
