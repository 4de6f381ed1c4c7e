"""What a stack does not say of a driver's source: packages beside its own, what binds them, where they come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_DKMS = ("dkms", "dh-dkms")
_ALL = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libegl-nvidia0",
    "libgles-nvidia*",
    "libglx-nvidia0",
    "libnvsdm*",
    "libxnvctrl0",
    "cuda-drivers*",
    "firmware-nvidia-gsp",
    "xserver-xorg-video-nvidia*",
)


@dataclass(frozen=True)
class DriverSource:
    """Package names of one source of drivers, on a system with apt."""

    pin_packages: tuple[str, ...] = ()
    """Patterns of packages that are bound to one version."""
    pin_sources: tuple[str, ...] = ()
    """Source packages whose packages are; they count before ``pin_packages``."""
    components: tuple[str, ...] = ()
    """Of the distribution's archive, that hold the driver."""
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages beside the stack's, by the role's profile."""
    flavours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same by the flavour of the module."""
    dkms: Mapping[str, str] = field(default_factory=dict)
    """Name of the module for DKMS by flavour, where it is not ``nvidia``."""
    optional: tuple[str, ...] = ()
    """Installed where the source has them in the driver's release."""
    lift: tuple[str, ...] = ()
    """May come from any source where the preferred one is too old."""
    restore: tuple[str, ...] = ()
    """Go back to the distribution's version."""


SOURCES: Mapping[str, DriverSource] = {
    # nvidia-persistenced and nvidia-modprobe have versions of their own there.
    "debian": DriverSource(
        restore=_DKMS,
        pin_sources=("nvidia-graphics-drivers", "nvidia-open-gpu-kernel-modules"),
        components=("contrib", "non-free", "non-free-firmware"),
        profiles={
            "headless": (
                "firmware-nvidia-gsp",
                "libcuda1",
                "libnvidia-cfg1",
                "libnvidia-ml1",
                "libnvidia-nvvm4",
                "libnvidia-pkcs11-openssl3",
                "libnvidia-ptxjitcompiler1",
                "nvidia-alternative",
                "nvidia-legacy-check",
                "nvidia-smi",
            ),
            "full": ("firmware-nvidia-gsp", "nvidia-driver-full"),
        },
        flavours={"proprietary": ("nvidia-kernel-support",), "open": ("nvidia-open-kernel-support",)},
        dkms={"proprietary": "nvidia-current", "open": "nvidia-current-open"},
    ),
    "nvidia": DriverSource(lift=_DKMS, pin_packages=_ALL, optional=("nvidia-persistenced", "nvidia-modprobe")),
    "ubuntu": DriverSource(restore=_DKMS, pin_packages=_ALL),
}
LIFTED = SOURCES["nvidia"].lift
"""What a removal takes back to the distribution's version."""
