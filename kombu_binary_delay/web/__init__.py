"""Web pages that show delayed messages, and with which operators can change them.

* ``application``: the ASGI application; ``guard``: users, hosts, headers, tokens; ``passwords``:
  hashes of passwords.
* ``pages``: the handler of each address; ``drawing`` and ``templates``: how values look.
* ``reader``: a thread that reads for all pages; ``watch``: what it reads from a broker.
* ``actions``: what waits for a confirmation.

It needs the extra ``web``. Nothing here imports the command line.
"""
