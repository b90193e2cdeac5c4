"""What a connection knows of the broker, and what follows from it. Pure: no I/O, no clock.

The router is asked and answers with plans, and with generators of commands, which the executor runs
on a real broker and the tests on a simulated one.
"""
