"""``python -m kombu_binary_delay.spark``, and the file to pass to ``spark-submit``."""

from kombu_binary_delay.spark.cli import spark

if __name__ == "__main__":
    spark(prog_name="kombu-binary-delay spark")
