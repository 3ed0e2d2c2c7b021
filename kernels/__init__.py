"""Triton kernels, installed as ``replayinfer.kernels``.

Importing this package loads no kernel and no Triton; the modules below it do.
"""

if __name__ != "replayinfer.kernels":
    raise ImportError(
        f"kernels: got an import as {__name__!r}; allowed 'replayinfer.kernels', since this would "
        "be a second copy of every kernel; install the package (pip install -e .)"
    )
