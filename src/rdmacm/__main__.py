"""``python -m rdmacm`` runs the ``rdmacm`` command."""

from __future__ import annotations

import sys

from rdmacm.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
