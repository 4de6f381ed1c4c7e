"""gpunode: provision GPU servers, and prove that they work."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gpunode")
except PackageNotFoundError:  # a zipapp or a bare checkout carries no metadata
    __version__ = "0+unknown"
