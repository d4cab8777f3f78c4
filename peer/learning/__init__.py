"""Models, data and local training; a model leaves this room as one flat float32 vector.

May import: numpy, torch, scikit-learn, pillow, `peer.errors`, `peer.plan`, `peer.randomness`. Knows
nothing of peers, matching or the network.
"""
