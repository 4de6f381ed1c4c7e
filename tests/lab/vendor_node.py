"""A lab node in front of the vendor repository, as tests use it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpunode.lab import LabNode

_FETCH = "import sys, urllib.request; sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=60).read())"


@dataclass(frozen=True)
class Shell:
    """Root's shell on a node."""

    node: LabNode

    def ask(self, text: str, timeout_s: float = 600) -> tuple[int, str]:
        """Exit status and both outputs of a shell command."""
        env = {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        done = self.node.run(["bash", "-c", text], timeout_s=timeout_s, env=env)
        return done.returncode, done.stdout + done.stderr

    def do(self, text: str, timeout_s: float = 600) -> str:
        """The output of a shell command that must succeed."""
        rc, output = self.ask(text, timeout_s)
        assert rc == 0, f"{text}: {output[-2000:]}"
        return output

    def fetch(self, url: str, path: str) -> None:
        """Download to a file, as curl would."""
        self.do(f"python3 -c {_FETCH!r} {url} > {path}")

    def trust(self, system: str) -> None:
        """Install cuda-keyring, as NVIDIA's guide begins."""
        self.fetch(f"http://vendor/compute/cuda/repos/{system}/x86_64/cuda-keyring_1.1-1_all.deb", "/tmp/keyring.deb")
        self.do("dpkg --install /tmp/keyring.deb && apt-get --quiet update")

    def would(self, command: str) -> dict[str, str]:
        """What apt-get would install or upgrade: name → version."""
        output = self.do(f"apt-get --simulate --no-install-recommends {command}")
        lines = [line.split() for line in output.splitlines() if line.startswith("Inst ")]
        return {words[1]: next(word for word in words[2:] if word.startswith("("))[1:] for words in lines}

    def installed(self, patterns: Sequence[str]) -> dict[str, str]:
        """Return the versions of the installed packages with names that match one of dpkg's patterns."""
        output = self.ask(
            f"dpkg-query -W -f '${{db:Status-Abbrev}} ${{Package}} ${{Version}}\\n' {' '.join(patterns)}"
        )[1]
        lines = [line.split() for line in output.splitlines()]
        return {words[1]: words[2] for words in lines if words[0] == "ii" and len(words) == 3}
