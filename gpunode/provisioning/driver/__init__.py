"""The role nvidia_driver: one plan of packages and kernel modules, for apt and for dnf."""
