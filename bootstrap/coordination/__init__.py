"""The rules of central methods: who takes part, which model is whose, how models are averaged.

Pure: numbers in, numbers out; a coordinator and the laboratory follow the same functions. May
import numpy, SciPy and the small modules of `peer`; no sockets, no clock, no torch. Only
`tree_store` and `tensor_files` touch the disk, and only `tree_picture` draws.
"""
