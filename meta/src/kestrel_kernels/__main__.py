"""`python -m kestrel_kernels` is the command `kestrel-kernels`."""

from .cli import main

main()
