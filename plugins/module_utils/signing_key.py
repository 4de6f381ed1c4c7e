"""Fetch the key that signs a repository. The controller verifies that it is the publisher's."""

from __future__ import annotations

import base64
import http.client
import io
import resource
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

LIMIT_S = 30
LARGEST = 1 << 20
LARGEST_TREE = 8 << 20
"""Maximum size of the files in the keyring package, in bytes."""
TRIES = 3
PAUSE_S = 2


class StaysEncrypted(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to another protocol: anybody on the path could replace the key."""

    def redirect_request(  # noqa: PLR0913, PLR0917 - urllib's
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and not newurl.startswith("https:"):
            raise urllib.error.HTTPError(req.full_url, 403, f"it leads to {newurl}, without encryption", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetched(url: str, proxy: str) -> bytes:
    """Return the content of a URL. Network errors are retried, a missing file is not."""
    proxies = {"http": proxy, "https": proxy} if proxy else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), StaysEncrypted)
    for attempt in range(1, TRIES + 1):
        try:
            with opener.open(url, timeout=LIMIT_S) as answer:
                return bytes(answer.read(LARGEST))
        except (OSError, http.client.HTTPException) as error:
            missing = isinstance(getattr(error, "reason", None), FileNotFoundError)
            if attempt == TRIES or missing or 400 <= (getattr(error, "code", 0) or 0) < 500:
                raise
        time.sleep(PAUSE_S * attempt)
    raise AssertionError


def keyring_of(package: bytes) -> bytes:
    """Return the keyring in a Debian package; data that are no such package are returned as they are."""
    with tempfile.NamedTemporaryFile(suffix=".deb") as file, tempfile.TemporaryFile() as unpacked:
        file.write(package)
        file.flush()
        try:
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
            with tarfile.open(fileobj=io.BytesIO(unpacked.read(LARGEST_TREE))) as tree:
                for member in tree:
                    if member.isfile() and member.name.endswith("/cuda-archive-keyring.gpg"):
                        inside = tree.extractfile(member)
                        return inside.read(LARGEST) if inside is not None else b""
        except (subprocess.SubprocessError, tarfile.TarError):
            return package
    return b""


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"key": base64, "url": where it is from}``, or ``{"error": one line}``.

    The question has the ``url`` of the key, and may have a ``keyring``, the address of a package that contains it and
    is read if the file cannot be, and a ``proxy``, with or without a password.
    """
    error = ""
    for url, reader in ((question["url"], bytes), (question.get("keyring"), keyring_of)):
        try:
            if url:
                key = reader(fetched(url, question.get("proxy") or ""))
                return {"key": base64.b64encode(key).decode("ascii"), "url": url}
        except (OSError, ValueError, http.client.HTTPException) as err:
            error = error or " ".join(f"{url}: {err}".split())
    return {"error": error}
