"""``python -m rdmacm`` runs the ``rdmacm`` command."""

from __future__ import annotations

from rdmacm.tools.main import command

if __name__ == "__main__":
    command()
