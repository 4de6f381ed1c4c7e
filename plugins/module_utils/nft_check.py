# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Validate rules with nft. Nothing is loaded."""

from __future__ import annotations

import subprocess
from typing import Any

LIMIT_S = 60


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Return ``error``: the reason in one line why nft rejects the rules in ``text``; None if it accepts them."""
    try:
        done = subprocess.run(
            ["/usr/sbin/nft", "-c", "-f", "-"],
            input=question["text"].encode(),
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return {"error": " ".join(str(err).split())}
    if done.returncode == 0:
        return {"error": None}
    lines = [" ".join(line.split()) for line in done.stderr.decode("utf-8", "replace").splitlines()]
    return {"error": "; ".join(line for line in lines if line)[:500] or f"exit status {done.returncode}"}
