"""Bytes as people read them."""


def mib(size: float) -> float:
    """Return bytes in MiB (2**20 bytes).

    Args:
        size: A number of bytes.
    """
    return size / 2**20


def gib(size: float) -> float:
    """Return bytes in GiB (2**30 bytes).

    Args:
        size: A number of bytes.
    """
    return size / 2**30
