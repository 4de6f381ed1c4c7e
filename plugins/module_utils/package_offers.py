"""List the packages that this node's repositories offer, by exact name or shell pattern. Changes nothing on the node.

The question is ``{"names": [names and shell patterns], "files": {path: text}}``; ``files`` are planned files of
/etc/apt or /etc/yum.repos.d and may be left out. The answer is ``{"offered": {name: [versions, newest first]}}``, or
``{"error": one line}`` if the package manager cannot be run. Lists are fetched to a private folder.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import commands
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    ANSWER_LIMIT_S,
    UPDATE_LIMIT_S,
    AptError,
    offered,
    output_of,
    private_apt,
    refresh,
)
from ansible_collections.gpunode.node.plugins.module_utils.dnf_transaction import (
    TransactionRefusedError,
    repositories_of,
)

DNF_LIMIT_S = 300
MOST = 200


def by_apt(names: Sequence[str], files: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """Return name to versions, from lists that are fetched for it and deleted afterwards."""
    with private_apt(files or {}) as (_folder, options):
        failed = refresh(["apt-get", *options], UPDATE_LIMIT_S)
        known = output_of(["apt-cache", *options, "pkgnames"], ANSWER_LIMIT_S).split()
        wanted = sorted({choice for choice in known if any(fnmatch.fnmatchcase(choice, name) for name in names)})[:MOST]
        by_name = {name: versions for name, versions in offered(options, wanted).items() if versions}
        if failed and not by_name:
            raise AptError("; ".join(failed))
        return by_name


def by_dnf(names: Sequence[str], files: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """Return name to versions, from dnf's command line, which is the same for dnf 4 and 5."""
    # Only metadata are read: packages are verified when they are installed.
    options = [f"--repofrompath={row['id']}-asked,{row['url']}" for row in repositories_of(files or {}) if row["url"]]
    argv = ["dnf", "--quiet", *options, "repoquery", "--queryformat", "%{name} %{evr}\n", *names]
    status, output, errors = commands.run(argv, DNF_LIMIT_S)
    if status != 0:
        raise AptError((errors.strip().splitlines() or ["dnf repoquery failed"])[-1])
    by_name: dict[str, list[str]] = {}
    for line in output.splitlines():
        name, _, version = line.strip().partition(" ")
        if version and len(by_name) < MOST:
            by_name.setdefault(name, []).insert(0, version)
    return by_name


def answered(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer; ``error`` is the reason if the package manager cannot be run."""
    names = [str(name) for name in question["names"]]
    ask = by_apt if Path("/usr/bin/apt-get").exists() else by_dnf
    try:
        return {"offered": ask(names, question.get("files") or {})}
    except (AptError, TransactionRefusedError, OSError) as error:
        return {"error": " ".join(str(error).split())[:500]}
