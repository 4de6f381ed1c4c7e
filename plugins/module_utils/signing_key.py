"""Fetch the armored key that signs an archive. The controller verifies that it is the publisher's key."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Any

LIMIT_S = 30
LARGEST = 1 << 20
TRIES = 3
PAUSE_S = 2


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"text": …}`` with the content of ``url``, or ``{"error": one line}``."""
    url = str(question["url"])
    error = "not tried"
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310 - the plan allows https alone
                return {"text": answer.read(LARGEST).decode("utf-8", "replace")}
        except urllib.error.HTTPError as err:
            error = f"HTTP status {err.code}"
            if 400 <= err.code < 500:
                break
        except (OSError, ValueError) as err:
            error = " ".join(str(err).split())
        if attempt < TRIES:
            time.sleep(PAUSE_S * attempt)
    return {"error": f"{url}: {error}: set the key to a file on the controller, or check the network of the node"}
