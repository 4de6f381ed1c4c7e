"""Sources of drivers on systems with apt: packages that a stack does not list, their pins, their origins."""

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
    """Patterns of packages that are pinned to one version."""
    pin_sources: tuple[str, ...] = ()
    """Source packages of which all packages are pinned; they take precedence over ``pin_packages``."""
    components: tuple[str, ...] = ()
    """Components of the distribution's archive with the driver."""
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages in addition to the stack's, by the role's profile."""
    flavours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same by the flavour of the module."""
    dkms: Mapping[str, str] = field(default_factory=dict)
    """Name of the module in DKMS by flavour, if it is not ``nvidia``."""
    optional: tuple[str, ...] = ()
    """Installed if the source has them in the driver's release."""
    lift: tuple[str, ...] = ()
    """May come from any source if the preferred one is too old."""
    restore: tuple[str, ...] = ()
    """Return to the distribution's version on removal."""


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
"""Packages that a removal returns to the distribution's version."""
