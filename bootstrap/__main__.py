"""`python -m bootstrap` is the `bootstrap` command."""

from bootstrap.cli import main

main()
