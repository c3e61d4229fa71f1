"""``python -m stapes``."""

from stapes.cli.main import main

main()
