"""Print the key of NVIDIA's repository where the node has none that is whole, as JSON. Changes nothing on the node.

Runs as ``python3 -I -c`` with the standard library alone. Standard input: ``{"path": where the key is on the node,
"record": file with the sum that it had when it was written, "url": of the keyring package, "sha256": of that package,
or null}``. The answer is ``{}`` where the key is as it was written, ``{"key": base64, "sha256": of the package}``, or
``{"error": one line}``.
"""

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

LIMIT_S = 60
LARGEST = 1 << 20


def is_whole(path, record):
    """The key is there and as it was written."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() == Path(record).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return False


def fetched(url):
    """The content behind an address."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310
        return answer.read(LARGEST)


def keyring_of(package):
    """The keyring in a Debian package."""
    with tempfile.NamedTemporaryFile(suffix=".deb") as file:
        file.write(package)
        file.flush()
        done = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", file.name],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tree:
        for member in tree:
            if member.isfile() and member.name.endswith("/cuda-archive-keyring.gpg"):
                return tree.extractfile(member).read()
    raise ValueError("the package holds no keyring")


def main():
    """Print one JSON document."""
    asked = json.load(sys.stdin)
    said = {}
    if not is_whole(asked["path"], asked["record"]):
        try:
            package = fetched(asked["url"])
            found = hashlib.sha256(package).hexdigest()
            if asked["sha256"] and found != asked["sha256"]:
                said = {"error": f"{asked['url']} has the sum {found}, not {asked['sha256']}", "differs": True}
            else:
                said = {"key": base64.b64encode(keyring_of(package)).decode("ascii"), "sha256": found}
        except (OSError, ValueError, subprocess.SubprocessError, tarfile.TarError) as error:
            said = {"error": " ".join(f"{asked['url']}: {error}".split())}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
