"""Purpose: what the broker does at a rate: how busy its schedulers are, and its busiest processes.

    python -m benchmarks.limit RATE

Delayed messages are sent at this rate, as in the section `sustained`, and after ten seconds the
node is asked what it did within four. Reductions are Erlang's measure of work. RABBITMQ_ROOT
chooses another broker.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from time import sleep

from benchmarks.rig import brief
from benchmarks.travel import journey, seconds
from benchmarks.variants import OnLadder
from dev.broker import Broker
from kombu_binary_delay import Topology

#: Seconds of rest, then of messages, and after how many of both the node is asked.
IDLE, OVER, AFTER = 2, 20, 12
ASKED = """
    Ask = self(),
    spawn(fun() -> Ask ! {usage, recon:scheduler_usage(4000)} end),
    Busy = recon:proc_window(reductions, 12, 4000),
    All = lists:sum([R || {_, R, _} <- recon:proc_window(reductions, 5000, 2000)]) * 2,
    Usage = receive {usage, U} -> [round(100 * Of) || {_, Of} <- U] end,
    Name = fun(P) -> case process_info(P, registered_name) of
        {registered_name, N} -> N; _ -> proc_lib:translate_initial_call(P) end end,
    Length = fun(P) -> case process_info(P, message_queue_len) of {_, L} -> L; _ -> gone end end,
    io:format("schedulers, per cent: ~w~n", [lists:sublist(Usage, 8)]),
    [io:format("~5.1f % of reductions, ~w in its mailbox: ~p~n",
        [100 * R / All, Length(P), Name(P)]) || {P, R, _} <- Busy],
    done.
"""


def main(rate: float) -> None:
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker, ThreadPoolExecutor() as pool:
        delays = seconds(round(rate * OVER), 1, 8)
        run = pool.submit(journey, [broker], OnLadder("ours", Topology()), delays, rate, IDLE)
        sleep(AFTER)
        print(f"RabbitMQ {broker.version} at {rate:.0f} a second")
        print(broker.ctl("eval", ASKED))
        print(brief(run.result()))


if __name__ == "__main__":
    main(float(sys.argv[1]))
