"""The population engine: all peers' models as one matrix, trained many at once on every core.

`layers` computes a stack of small models, `trainer` trains them as a live peer would train each,
`workers` spreads that over one single-thread process a core, and `laboratory` runs the rounds.
Imports torch, so nothing here is imported before it is needed.
"""
