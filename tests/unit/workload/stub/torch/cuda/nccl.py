"""Version of the NCCL in this build."""


def version():
    return (2, 28, 3)
