"""Triton kernels, installed as ``replayinfer.kernels``.

Importing this package loads no kernel and no Triton; the modules below it do.
"""

if __name__ != "replayinfer.kernels":
    # Found as `kernels` because the repository's root is on the path. That must not become a second
    # copy of every kernel, and must not break a library that merely looks whether a package called
    # `kernels` exists: the import is inert, and whatever is asked of it is refused.
    __path__ = []

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"kernels.{name}: got the repository's folder imported as {__name__!r}; allowed "
            f"'replayinfer.kernels.{name}', since this would be a second copy of every kernel; "
            "install the package (pip install -e .)"
        )
