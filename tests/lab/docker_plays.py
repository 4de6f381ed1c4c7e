"""What the tests of the roles docker and nvidia_container_toolkit share: their play, and a tiny image on the node."""

import json
from pathlib import Path
from typing import Any

from playbook_runs import Run, Site

DAEMON = "/etc/docker/daemon.json"

# dash, a few tools and their libraries: enough to look at devices from inside.
TINY = """
cd /
libraries=$(ldd bin/sh bin/sleep bin/cat bin/ls bin/head | grep -o '/[^ ]*[.]so[^ ]*' | sort -u | cut -c 2-)
tar -ch bin/sh bin/sleep bin/cat bin/ls bin/head $libraries | docker import - tiny > /dev/null
"""


class Roles:
    """Preflight and some roles as a play of their own, run on the first node of a lab."""

    def __init__(self, site: Site, folder: Path, *roles: str) -> None:
        lines = ["- hosts: all", "  gather_facts: false", "  roles:"]
        lines += [f"    - role: gpunode.node.{role}" for role in ("preflight", *roles)]
        self.file = folder / "play.yml"
        self.file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.site = site

    def play(self, *arguments: str) -> Run:
        """One run of the play."""
        return self.site.play(*arguments, playbook=str(self.file))

    def done(self, *arguments: str) -> Run:
        """One run that must succeed."""
        run = self.play(*arguments)
        assert run.rc == 0, run.output
        return run

    def daemon(self) -> dict[str, Any]:
        """daemon.json as it is."""
        settings: dict[str, Any] = json.loads(self.site.sh(f"cat {DAEMON}"))
        return settings

    def restart_count(self) -> str:
        """Changes with every start of the daemon."""
        return self.site.sh("cat /run/docker.pid")
