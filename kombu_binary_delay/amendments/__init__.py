"""What waits can be taken back: cancelled, postponed, or superseded by a later message.

A level queue cannot be searched. So what waits is amended where it arrives: a record in a stream
says what is to become of it, and each connection that consumes reads that stream first.

* :mod:`.record`: what an amendment says. Pure.
* :mod:`.memory`: what one connection has read, and what becomes of a message. Pure.
* :mod:`.parts`: what it takes on the broker. Pure.
* :mod:`.stream`: amendments written to the broker, and read from it, on a :mod:`.channel` of their
  own; many at once by :mod:`.bulk`.
* :mod:`.celery`: a revoke of Celery's, made to last.
* :mod:`.door`: the part of a channel where all that counts.
* :mod:`.api`: what a program calls.
"""
