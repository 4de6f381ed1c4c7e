"""What a run does on nodes: leases by their program, changes by the playbooks, proof by looks."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunode.change import leases
from gpunode.change.run import Records, Results
from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.errors import UsageError
from gpunode.fleet.playbook import CALLBACKS, playbook_of, run
from gpunode.history.snapshot import Snapshot
from gpunode.judging.evaluator import Evaluator
from gpunode.names import expand
from gpunode.upgrade.looks import Connections, NodeLook, look_at, read_before, why_not_as_good, write_measured

_FAILED = re.compile(r"^gpunode: failed on (?P<names>\S+): (?P<why>.*)$", re.MULTILINE)


@dataclass
class AnsibleNodes:
    """The interface of ``gpunode.change.run.Nodes``."""

    connections: Connections
    evaluator: Evaluator
    folder: Path
    """Of the run: logs, snapshots before the change."""
    owner: str
    way_back: bool
    """A node without a way back to its release is refused while it is prepared."""
    kept: str = ""
    """The run with the snapshots that nodes go back to; empty: they go forward, and this run keeps snapshots."""
    image: str = ""
    """What nodes are measured in that were not measured before; empty: nothing is measured."""
    scheduler: str = "none"
    """What is asked for a reboot before Ansible does it."""
    not_measured: set[str] = field(default_factory=set)
    """Nodes that were compared without figures, although figures were requested."""

    def _ask(self, nodes: Records, op: str) -> Results:
        questions: dict[str, dict[str, Any]] = {}
        for name, node in nodes.items():
            question = {"op": op, "token": node.token, "owner": self.owner, "lasts_s": leases.LASTS_S}
            questions[name] = question | ({"findings": read_before(self.folder, name).findings} if op == "mark" else {})
        return leases.ask(
            [self.connections.targets[name] for name in nodes],
            questions,
            parallel=self.connections.parallel,
            timeout_s=self.connections.timeout_s,
            become_password=self.connections.password,
        )

    def lease(self, nodes: Records) -> Results:
        """Take or renew leases."""
        return self._ask(nodes, "take")

    def mark(self, nodes: Records) -> Results:
        """Mark nodes as drained."""
        return self._ask(nodes, "mark")

    def free(self, nodes: Records) -> Results:
        """Remove marks and leases."""
        return self._ask(nodes, "free")

    def prepare(self, nodes: Records) -> Results:
        """Download the packages of the target."""
        return self._play("prepare.yml", nodes, {"gpunode_way_back": self.way_back and not self.kept})

    def busy(self, nodes: Records) -> Results:
        """Return what computes on GPUs."""
        looks = look_at(self.connections, self.evaluator, nodes)
        return {name: looks[name].reason or looks[name].busy for name in nodes}

    def measure(self, nodes: Records) -> Results:
        """Measure nodes that have their release still, and keep the figures of each as soon as it has some."""
        results: Results = {}
        if not self.image:
            return results

        def keep(look: NodeLook) -> None:
            if look.snapshot is None or look.release == look.loaded == nodes[look.host].before:
                results.update(write_measured(self.folder, look, self.image))
            # Else an earlier run changed it, and what it was before cannot be measured any more.

        names = [name for name in nodes if read_before(self.folder, name).measured is None]
        if names:
            look_at(self.connections, self.evaluator, names, image=self.image, each=keep)
        return results

    def change(self, nodes: Records) -> Results:
        """Run the site playbook without a reboot."""
        return self._play("site.yml", nodes, {"gpunode_reboot": "never"})

    def reboot(self, nodes: Records) -> Results:
        """Run the site playbook again: it reboots if that is pending, and does what waited for it."""
        return self._play("site.yml", nodes, {"gpunode_reboot": "when_needed", "__gpunode_scheduler": self.scheduler})

    def validate(self, nodes: Records) -> Results:
        """Compare nodes with their snapshots before, and their figures in the image of before, if there are some."""
        befores = {name: read_before(self.folder, name) for name in nodes}
        results = self._compared(nodes, {name: before.snapshot for name, before in befores.items()})
        if not self.image:
            return results
        measured: dict[str, dict[str, Snapshot]] = {}
        for name in (name for name, reason in results.items() if not reason):
            before = befores[name]
            if before.measured is None:
                self.not_measured.add(name)
            else:
                measured.setdefault(before.image or self.image, {})[name] = before.measured
        for image, figures in sorted(measured.items()):
            results |= self._compared({name: nodes[name] for name in figures}, figures, image=image)
        return results

    def _compared(self, nodes: Records, befores: Mapping[str, Snapshot], *, image: str | None = None) -> Results:
        looks = look_at(self.connections, self.evaluator, nodes, image=image)
        return {name: why_not_as_good(befores[name], looks[name], node.aim) for name, node in nodes.items()}

    def _play(self, playbook: str, nodes: Records, more: Mapping[str, Any]) -> Results:
        """Run a playbook on nodes; return why it failed on each."""
        log = self.folder / f"{len(list(self.folder.glob('*.log'))) + 1:03}-{playbook.removesuffix('.yml')}.log"
        retry = self.folder / "retry" / playbook.replace(".yml", ".retry")
        retry.unlink(missing_ok=True)
        env = ansible_environment() | {
            "ANSIBLE_RETRY_FILES_ENABLED": "1",
            "ANSIBLE_RETRY_FILES_SAVE_PATH": str(retry.parent),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACKS_ENABLED": CALLBACKS,
        }
        argv = [
            *(ansible_program("ansible-playbook"), str(playbook_of(collection_root(), playbook))),
            *(word for source in self.connections.inventories for word in ("--inventory", source)),
            *self.connections.arguments,
            *("--limit", ",".join(nodes), "--extra-vars", json.dumps(variables_of(nodes, more, kept=bool(self.kept)))),
            *(("--become-password-file", "-") if self.connections.password is not None else ()),
        ]
        with log.open("wb") as stream:
            os.fchmod(stream.fileno(), 0o600)
            code = run(argv, env, self.connections.password, log=stream)
        if code < 0:
            raise KeyboardInterrupt
        try:
            failed = set(retry.read_text(encoding="utf-8").split())
        except OSError:
            failed = set() if code == 0 else set(nodes)
        why = reasons_in(log.read_text(encoding="utf-8", errors="replace"))
        return {name: f"{why.get(name, f'{playbook} failed')} ({log})" if name in failed else "" for name in nodes}


def variables_of(nodes: Records, more: Mapping[str, Any], *, kept: bool = False) -> dict[str, Any]:
    """Return the variables with the highest precedence: each node has its own release and token.

    ``kept``: all nodes go back to a release of which they keep the packages.
    """
    return {
        "gpunode_hosts": "all",
        "__gpunode_targets": {name: node.aim for name, node in nodes.items()},
        "__gpunode_tokens": {name: node.token for name, node in nodes.items()},
        "nvidia_driver_version": "{{ __gpunode_targets[inventory_hostname] }}",
        "__gpunode_backward": [name for name, node in nodes.items() if node.back or kept],
        "gpunode_kept": "{{ inventory_hostname in __gpunode_backward }}",
        "gpunode_change": "{{ __gpunode_tokens[inventory_hostname] }}",
        # The run drains and returns the nodes, in its waves.
        "gpunode_drain_tasks": None,
        "gpunode_undrain_tasks": None,
        "__gpunode_drained": True,
        "gpunode_serial": "100%",
        **more,
    }


def reasons_in(log: str) -> dict[str, str]:
    """Return why nodes failed, from the lines of the callback ``roles``."""
    reasons: dict[str, str] = {}
    for line in _FAILED.finditer(log):
        with suppress(UsageError):
            reasons.update(dict.fromkeys(expand(line["names"]), line["why"]))
    return reasons
