"""Amend waiting messages: cancel them, postpone them, or supersede them by a later message.

A level queue cannot be searched, so an amendment takes effect on delivery: a record in a stream
says what happens to the message, and each consuming connection reads that stream first.

* :mod:`.record`: the records, as values and as JSON. Pure.
* :mod:`.memory`: what one connection has read, and what happens to a message; :mod:`.names`: what
  is known of ids, and of keys. Pure.
* :mod:`.parts`: the exchange and the streams. Pure.
* :mod:`.stream`: what a connection writes, on a separate :mod:`.channel`.
* :mod:`.reading`: what it reads before it consumes, and from then on.
* :mod:`.holding`: messages that cannot be delayed again while the broker blocks publishers.
* :mod:`.generations`: names what supersedes other messages, and records it.
* :mod:`.way_in`: judges deliveries, and does what follows from it.
* :mod:`.api`: the functions that a program calls.
"""
