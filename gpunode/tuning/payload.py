"""What the payload inside a container is told of the catalog, which it cannot read."""

from packaging.version import Version as Number

from gpunode.catalog import load


def payload_settings() -> dict[str, str]:
    """The JSON object for the payload's ``--settings``: ``{"compile_min_capability": "7.0"}``.

    From the newest release of which the catalog knows it.
    """
    known = [row for row in load().frameworks.values() if row.compile_min_compute_capability is not None]
    if not known:
        return {}
    newest = max(known, key=lambda row: Number(row.version))
    return {"compile_min_capability": str(newest.compile_min_compute_capability)}
