"""``python -m kombu_binary_delay.cli``."""

from . import main

main()
