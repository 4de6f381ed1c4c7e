"""Version of the NCCL in this build."""


def version() -> tuple[int, int, int]:
    return (2, 28, 3)
