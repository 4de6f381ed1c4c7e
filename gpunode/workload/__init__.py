"""What runs inside a container on a node, and what starts it there.

``launch`` is handed the way to a node and runs the payload over it; docs/workload.md tells what it may and may not do.
"""

from gpunode.workload.container import hides_image
from gpunode.workload.image import ImageFile, read_image_file
from gpunode.workload.launch import WorkloadRequest, failed, launch
from gpunode.workload.way import LaunchFailure, ProgramStream, Transport

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
