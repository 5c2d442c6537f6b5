"""Refuse a torch that Penstock does not work with, in one line, where torch is first needed."""


def require_torch() -> None:
    """Import torch, and see that it is new enough and has what Penstock needs.

    Raises:
        TorchError: it is too old, or lacks a private name; says which versions work.
    """
    import penstock.torch_private  # noqa: F401 - for what it raises
