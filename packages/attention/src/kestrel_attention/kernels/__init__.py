"""The CuTe kernels of this family, and the table of what is compiled ahead of time."""
