"""containerd's own configuration beside the drop-in that nvidia-ctk writes."""

import tomllib

CRI, CRI_VERSION = "io.containerd.grpc.v1.cri", 2


def containerd_config(text: str | None) -> str:
    """Return containerd's configuration with its usual runtime beside the toolkit's; None: there is no file.

    containerd 1 has runc by itself only as long as its file names no runtime at all: with the toolkit's alone, its
    plugin for Kubernetes does not start. Comments stay.
    """
    text = text or "version = 2\n"
    runc = f'\n[plugins."{CRI}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
    try:
        document = tomllib.loads(text)
        settings = document.get("plugins", {}).get(CRI, {}).get("containerd", {})
        known = settings.get("default_runtime_name", "runc") != "runc" or "runc" in settings.get("runtimes", {})
        tomllib.loads(text + runc)
    except (ValueError, AttributeError):
        return text  # nvidia-ctk reports what is wrong with such a file
    return text if known or document.get("version") != CRI_VERSION else text + runc
