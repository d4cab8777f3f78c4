"""Scenarios: one file that says who learns over which network, and what happens to it when.

`scenario` reads and checks the file (`topology`, `links`, `devices` and `script` are its tables,
`lines` finds what a message is about); `virtual` runs it: real learning on a network whose time is
computed (`clock`, `wire`, `world`), by the protocol of live peers. `runs`, `pictures` and `sweep`
are what a person gets of it. Imports `peer` and the rest of `simulations`; of these only the
command line and the report import it. Importing the tables needs no torch.
"""
