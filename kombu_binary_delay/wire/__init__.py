"""What talks to the broker on one connection: declares, waits, buffers, and reads frames."""
