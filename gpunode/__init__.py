"""gpunode: provision GPU servers, and prove that they work."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> Any:
    """Return ``__version__`` on first use: most calls never need it, and the look-up takes a tenth of their time."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 (see above)

    try:
        number = version("gpunode")
    except PackageNotFoundError:  # a zipapp or a bare checkout has no metadata
        number = "0+unknown"
    globals()[name] = number
    return number
