"""The workload: the payload that runs inside a container on a node, and the launcher that starts it there.

``launch`` gets a transport to a node and runs the payload over it; docs/workload.md lists what it may and may not do.
"""

from gpunode.workload.container import hides_image
from gpunode.workload.image import ImageFile, read_image_file
from gpunode.workload.launch import WorkloadRequest, failed, launch
from gpunode.workload.transport import LaunchFailure, ProgramStream, Transport

__all__ = [
    "ImageFile",
    "LaunchFailure",
    "ProgramStream",
    "Transport",
    "WorkloadRequest",
    "failed",
    "hides_image",
    "launch",
    "read_image_file",
]
