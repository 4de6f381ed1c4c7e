"""Filters of the roles docker and nvidia_container_toolkit; what they decide is in gpunode.provisioning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.errors import GpunodeError
    from gpunode.facts.node import CdiSpec
    from gpunode.provisioning import archives, cdi, daemon_json, engines
    from gpunode.provisioning.documents import node_of
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def answered(decide: Callable[[], Any]) -> Any:
    """Return what ``decide`` does, with its errors as Ansible's."""
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )
    try:
        return decide()
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None


def container_engine(version: Any, engine: str = "docker") -> dict[str, Any]:
    """Return ``engine_support`` with the publisher's repository, key, fingerprints and packages."""

    def decide() -> dict[str, Any]:
        found = asdict(engines.engine_support(version, engine))
        row = load().container_engines[engine]
        publisher = {"repository": row.repository, "key": row.key}
        return {**found, **publisher, "fingerprints": list(row.fingerprints), "packages": list(row.packages)}

    answer: dict[str, Any] = answered(decide)
    return answer


def docker_wishes(settings: Mapping[str, Any], text: str | None, swarm: bool = False) -> dict[str, Any]:
    """Return ``daemon_request`` under the names that the role reads."""
    found = answered(lambda: daemon_json.daemon_request(plain(settings), text, swarm))
    return {"wished": found.values, "notes": list(found.notes), "problem": found.problem}


def merged_daemon(
    text: str | None,
    wished: Mapping[str, Any] | None,
    memory: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``merge_daemon``."""
    found = answered(lambda: daemon_json.merge_daemon(text, plain(wished), plain(memory), plain(others)))
    return {**asdict(found), "keys": list(found.keys), "restart": list(found.restart)}


def restart_obstacles(state: Mapping[str, Any], facts: Mapping[str, Any], text: str | None) -> list[str]:
    """Return ``restart_obstacles`` for the answer of ``docker info`` (empty without a daemon)."""
    running, live = int(state.get("running") or 0), bool(state.get("live_restore"))
    found: list[str] = answered(lambda: engines.restart_obstacles(running, live, node_of(facts), text))
    return found


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "docker_engine": lambda have: answered(lambda: asdict(engines.installed_engine(plain(have)))),
            "container_engine": container_engine,
            "docker_wishes": docker_wishes,
            "merged_daemon": merged_daemon,
            "unknown_daemon_keys": lambda keys, text: answered(
                lambda: engines.unknown_options(plain(keys) or (), re.findall(r"--([a-z0-9-]+)", text))
            ),
            "restart_obstacles": restart_obstacles,
            "tcp_sockets": lambda text, command: answered(lambda: engines.tcp_addresses(text, command)),
            "stale_cdi": lambda specs, kept=None: answered(
                lambda: cdi.stale_specifications(
                    map(CdiSpec.model_validate, plain(specs or ())), kept or cdi.SPECIFICATION
                )
            ),
            "archive_file": lambda sources, uri, own: answered(lambda: archives.archive_file(plain(sources), uri, own)),
            "old_toolkit_files": lambda sources: answered(lambda: archives.old_toolkit_files(plain(sources))),
        }
