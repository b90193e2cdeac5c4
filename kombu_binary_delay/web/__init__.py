"""A page that shows what waits, and lets operators act on it.

* ``application``: the ASGI application; ``guard``: users, hosts, headers, tokens; ``passwords``:
  hashes of passwords.
* ``pages``: what each address answers; ``drawing`` and ``templates``: how that looks.
* ``reader``: a thread that reads for all pages; ``looks``: what it reads of a broker;
  ``index``: the tasks that were read last.
* ``plans``: acts that wait for a confirmation.

It needs the extra ``web``. Nothing here knows the command line.
"""
