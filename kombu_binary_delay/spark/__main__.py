"""``python -m kombu_binary_delay.spark``, and the file to pass to ``spark-submit``.

It is the whole tool, with ``spark`` as its first word: so all of its environment counts.
"""

import sys

from kombu_binary_delay.cli import binary_delay

if __name__ == "__main__":
    binary_delay(["spark", *sys.argv[1:]], prog_name="kombu-binary-delay")
