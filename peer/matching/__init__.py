"""Whom to learn with: similarity, sketches, the two-Gaussian EM, and one small class per method.

Pure: numbers in, choices out. May import numpy, `peer.errors` and `peer.randomness`; no sockets, no
clock, no torch.
"""
