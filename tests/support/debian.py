"""Packages of the newest suite of the distribution, fetched from the archive that apt-get uses and only unpacked."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from interop.machine.cache import Unavailable, run

__all__ = ["unpack_newest"]

#: By the origin of an archive: its suite with the newest packages.
_NEWEST = {"Debian": "sid", "Ubuntu": "devel"}


def unpack_newest(packages: Sequence[str], folder: Path) -> Path:
    """A root directory, made in an empty folder, with what is in these packages.

    Raises:
        Unavailable: this is neither Debian nor Ubuntu, or its archive cannot be reached.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"needs {tool}, to fetch packages of Debian or Ubuntu")
    known = run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"])
    found = [line.split() for line in known.splitlines()]
    archives = [(row[0], row[2]) for row in found if len(row) == 3 and row[1] == "main" and row[0] in _NEWEST]
    if not archives:
        raise Unavailable("apt-get has no lists of Debian's or Ubuntu's archive; run apt-get update")
    origin, archive = archives[0]
    keys = f"/usr/share/keyrings/{origin.lower()}-archive-keyring.gpg"
    sources, root = folder / "newest.list", folder / "root"
    sources.write_text(f"deb [signed-by={keys}] {archive} {_NEWEST[origin]} main\n")
    for each in ("lists/partial", "cache/archives/partial", "root"):
        (folder / each).mkdir(parents=True)
    options = {
        "Acquire::Languages": "none",
        "Acquire::Retries": 0,
        "Acquire::http::Timeout": 20,
        "APT::Sandbox::User": "root",  # another user could not write here
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": "/dev/null",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    # A name without an address is only a warning of "update"; then "download" finds no package.
    run([*command, "update"])
    run([*command, "download", *packages], cwd=folder)
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "--extract", str(package), str(root)])
    return root
