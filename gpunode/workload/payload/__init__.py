"""The program that runs inside the container: one file, Python 3.8 or later, the standard library and the image's
modules.
"""

from gpunode.workload.payload.pack import payload_script, payload_zip

__all__ = ["payload_script", "payload_zip"]
