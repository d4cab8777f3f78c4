"""The meeting point of a federation: hands out the plan and indices, and says who is there.

Imports `peer.network`, `peer.plan` and the small modules of `peer`; never torch nor a learner.
"""
