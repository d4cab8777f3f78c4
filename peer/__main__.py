"""`python -m peer`: the same as the `peer` command."""

from peer.cli import main

main()
