"""Messages, transport, membership and discovery.

Carries snapshots without knowing what is learned: a model is a run of bytes of an expected length.
May import numpy, msgpack, pyzmq, `peer.errors` and `peer.plan`.
"""
