"""The fault scenarios: what is confirmed arrives, and not early, whatever breaks. `make faults`.

ledger.py    what was confirmed, delivered and done, and the verdict on it
programs.py  publishers and consumers, processes of their own that can be killed
environment.py where a scenario runs: a broker or cluster, a ledger, and the programs
proxy.py     a connection that can be cut
report.py    the table, and the figures as JSON
scenarios/   a family: one kind of fault a file
"""
