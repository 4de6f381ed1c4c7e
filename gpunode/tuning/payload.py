"""Values of the catalog for the payload in a container, which cannot read the catalog."""

from packaging.version import Version as Number

from gpunode.catalog import load


def payload_settings() -> dict[str, str]:
    """Return the JSON object for the payload's ``--settings``: ``{"compile_min_capability": "7.0"}``.

    From the newest release with a value in the catalog.
    """
    known = [row for row in load().frameworks.values() if row.compile_min_compute_capability is not None]
    if not known:
        return {}
    newest = max(known, key=lambda row: Number(row.version))
    return {"compile_min_capability": str(newest.compile_min_compute_capability)}
