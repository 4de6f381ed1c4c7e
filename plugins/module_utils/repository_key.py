"""Fetch the key of NVIDIA's repository if the node has no intact copy. Changes nothing on the node.

Standard library only. The question::

    {"url": folder of the repository, "proxy": URL, with or without a password | "",
     "file": name of the key in that folder | null, "fingerprint": of the key | null,
     "sha256_without_version": of the file without the Version line in its headers | null,
     "keyring": name of the package that contains the key, fetched if the file is missing | null,
     "keyring_sha256": of that package | null}

The answer is ``{"key": base64, "fingerprint": …}``, or ``{"error": one line, "differs": true if something other than
NVIDIA's key was fetched}``. A key without a recorded fingerprint and checksum is never accepted: the name of the file
has only the last 32 bits of the fingerprint, and a key with the same ones is made in minutes.
"""

import base64
import hashlib
import io
import re
import resource
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request

from ansible_collections.gpunode.node.plugins.module_utils.openpgp import keys, without_version

LIMIT_S = 30
LARGEST = 1 << 20
LARGEST_TREE = 8 << 20
"""Maximum size of the files in the keyring package, in bytes."""
TRIES = 3
PAUSE_S = 2


class DiffersError(ValueError):
    """The fetched data are not the expected key."""


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
    with tempfile.NamedTemporaryFile(suffix=".deb") as file, tempfile.TemporaryFile() as unpacked:
        file.write(package)
        file.flush()
        subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", file.name],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=unpacked,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            start_new_session=True,
            # Nothing is verified yet: a package of 1 MiB may unpack to gigabytes.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_TREE, LARGEST_TREE)),
        )
        unpacked.seek(0)
        tar = io.BytesIO(unpacked.read(LARGEST_TREE))
    with tarfile.open(fileobj=tar) as tree:
        for member in tree:
            if member.isfile() and member.name.endswith("/cuda-archive-keyring.gpg"):
                inside = tree.extractfile(member)
                return inside.read(LARGEST) if inside is not None else b""
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
    if not found:
        raise DiffersError(f"{url} contains no key")
    return found[0][0], b"".join(whole for _, whole in found)


def verified(asked, url, content, known):
    """Raise DiffersError if a file without a recorded fingerprint does not have the recorded checksum."""
    found = hashlib.sha256(content).hexdigest()
    if not asked["fingerprint"] and found != known:
        raise DiffersError(f"{url} has the checksum {found}, expected {known or 'a recorded one'}")


def from_file(asked):
    """Return the key from the key file in the repository."""
    url = asked["url"] + asked["file"]
    data = fetched(url)
    key = the_key(data, asked, url)
    verified(asked, f"{url} without its Version line", without_version(data), asked["sha256_without_version"])
    return key


def from_keyring(asked):
    """Return the key from the keyring package."""
    url = asked["url"] + asked["keyring"]
    package = fetched(url)
    verified(asked, url, package, asked["keyring_sha256"])
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
    for reader in [reader for reader, name in ((from_file, "file"), (from_keyring, "keyring")) if asked[name]]:
        try:
            fingerprint, key = reader(asked)
            return {"key": base64.b64encode(key).decode("ascii"), "fingerprint": fingerprint}
        except DiffersError as error:
            return {"error": " ".join(str(error).split()), "differs": True}
        except (OSError, ValueError, urllib.error.URLError) as error:
            text = f"{asked['url']}{asked['file'] or asked['keyring']}: {error}"
            result = result or {"error": " ".join(text.split())}
    return result
