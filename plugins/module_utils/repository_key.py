"""Fetch the key of NVIDIA's repository if the node has no intact copy. Changes nothing on the node.

Standard library only. The question::

    {"path": path of the key on the node, "record": file with the checksum of the key when it was written,
     "url": folder of the repository, "proxy": URL, with or without a password | "",
     "file": name of the key in that folder | null, "fingerprint": of the key | null,
     "sha256_without_version": of the file without its Version line | null,
     "keyring": name of the package that contains the key, fetched if the file is missing | null,
     "keyring_sha256": of that package | null}

The answer is ``{}`` if the key is unchanged, ``{"key": base64, "fingerprint": …}``, or ``{"error": one line,
"differs": true if something other than NVIDIA's key was fetched}``.
"""

import base64
import hashlib
import io
import re
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.openpgp import keys

LIMIT_S = 30
LARGEST = 1 << 20
TRIES = 3
PAUSE_S = 2


class DiffersError(ValueError):
    """The fetched data are not the expected key."""


def is_whole(path, record):
    """Return whether the key exists and is unchanged since it was written."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() == Path(record).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return False


def fetched(url):
    """Return the content of a URL. Network errors are retried, a missing file is not."""
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310
                return answer.read(LARGEST)
        except (OSError, urllib.error.URLError) as error:
            code = getattr(error, "code", 0) or 0
            if attempt == TRIES or 400 <= code < 500 or isinstance(getattr(error, "reason", None), FileNotFoundError):
                raise
        time.sleep(PAUSE_S * attempt)
    raise AssertionError


def keyring_of(package):
    """Return the keyring in a Debian package."""
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
                inside = tree.extractfile(member)
                return inside.read() if inside is not None else b""
    raise DiffersError("the package contains no keyring")


def the_key(data, asked, url):
    """Return (fingerprint, bytes) of the expected key in fetched data. Raise DiffersError if it is missing."""
    if re.match(rb"\s*<(!doctype|html|\?xml)", data, re.IGNORECASE):
        raise DiffersError(f"{url} returned an HTML page: a proxy or a login page intercepts the connection")
    try:
        found = keys(data)
    except ValueError as error:
        raise DiffersError(f"{url} is not an OpenPGP key: {error}") from None
    names = ", ".join(fingerprint for fingerprint, _ in found) or "no key"
    if asked["fingerprint"]:
        found = [pair for pair in found if pair[0] == asked["fingerprint"]]
        if not found:
            raise DiffersError(f"{url} contains {names}, NVIDIA's key is {asked['fingerprint']}")
    elif asked["file"]:
        found = [pair for pair in found if pair[0].endswith(Path(asked["file"]).stem.upper())]
        if not found:
            raise DiffersError(f"{url} contains {names}, which does not end in {Path(asked['file']).stem.upper()}")
    if not found:
        raise DiffersError(f"{url} contains no key")
    return found[0][0], b"".join(whole for _, whole in found)


def from_file(asked):
    """Return the key from the key file in the repository."""
    url = asked["url"] + asked["file"]
    data = fetched(url)
    wanted = asked["sha256_without_version"]
    key = the_key(data, asked, url)
    lines = b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(b"Version"))
    if wanted and not asked["fingerprint"] and hashlib.sha256(lines).hexdigest() != wanted:
        raise DiffersError(f"{url} without its Version line has a checksum other than {wanted}")
    return key


def from_keyring(asked):
    """Return the key from the keyring package."""
    url = asked["url"] + asked["keyring"]
    package = fetched(url)
    found = hashlib.sha256(package).hexdigest()
    if asked["keyring_sha256"] and not asked["fingerprint"] and found != asked["keyring_sha256"]:
        raise DiffersError(f"{url} has the checksum {found}, not {asked['keyring_sha256']}")
    try:
        keyring = keyring_of(package)
    except (subprocess.SubprocessError, tarfile.TarError):
        keyring = package  # not a package: the_key reports what it is
    return the_key(keyring, asked, url)


def answered(asked):
    """Return the answer."""
    if asked.get("proxy"):
        proxies = {"http": asked["proxy"], "https": asked["proxy"]}
        urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler(proxies)))
    result: dict[str, object] = {}
    if not is_whole(asked["path"], asked["record"]):
        readers = [reader for reader, name in ((from_file, "file"), (from_keyring, "keyring")) if asked[name]]
        for reader in readers:
            try:
                fingerprint, key = reader(asked)
                result = {"key": base64.b64encode(key).decode("ascii"), "fingerprint": fingerprint}
                break
            except DiffersError as error:
                result = {"error": " ".join(str(error).split()), "differs": True}
                break
            except (OSError, ValueError, urllib.error.URLError) as error:
                text = f"{asked['url']}{asked['file'] or asked['keyring']}: {error}"
                result = result or {"error": " ".join(text.split())}
    return result
