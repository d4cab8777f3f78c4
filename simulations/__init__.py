"""The laboratory: federations on one machine, real or in one process, and reports about them.

Imports `peer` and `bootstrap`; nothing imports it.
"""
