"""`python -m simulations`: the same as the `simulate` command."""

from simulations.cli import main

main()
