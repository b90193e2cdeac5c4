r"""The two Erlang expressions for ``rabbitmqctl eval``; they only read.

``rabbit_quorum_queue:peek`` walks from the first message to one position, so reading all messages
takes quadratic time. Here the queue's process is asked once for the positions of the messages in
its log (``ra:local_query``; some 50 bytes a message while the queue is read), and the log is read
page by page, as RabbitMQ itself reads it for its consumers: with ``ra_server_proc:read_entries`` if
the node has it, otherwise with a log reader of Ra. Neither takes a message from the queue.

The node prints each page at once, so neither side keeps more than a page:

* ``kbd node CLUSTER EXISTS``: first, the name of its cluster in base64, and whether it has the
  virtual host.
* ``kbd queue TYPE NAME``: a queue (the first expression), the name in base64.
* ``kbd begin NUMBER``: the messages of a queue follow, by its number among those asked for.
* ``kbd page COUNT TERM``: of so many positions, the messages; a term of Erlang in base64, a list of
  pairs: the routing key, and the properties in the form that AMQP sends them.
* ``kbd skip NUMBER REASON``: a queue that cannot be read; the reason in base64.
* ``kbd end``.

Calls are kept few: the expression is interpreted, so each costs about a microsecond. A process of
its own holds the positions, which would be copied wherever the garbage of reading is collected;
it ends with the one that reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: The messages of a page: the most in memory at a time, here and on the node.
PAGE = 200
#: The longest list of names in an expression, in bytes. Linux takes 131,072 for a whole argument.
LONGEST = 100_000

_LIST = r"""
io:put_chars(["kbd node ", base64:encode(rabbit_nodes:cluster_name()), $\s,
  atom_to_list(rabbit_vhost:exists(VHost)), $\n]),
lists:foreach(fun({resource, _, _, Name} = Resource) ->
  case lists:any(fun(Prefix) -> string:prefix(Name, Prefix) =/= nomatch end, Prefixes) of
    false -> ok;
    true -> case rabbit_amqqueue:lookup(Resource) of
      {ok, Queue} -> io:put_chars(
        ["kbd queue ", atom_to_list(amqqueue:get_type(Queue)), $\s, base64:encode(Name), $\n]);
      _ -> ok
    end
  end
end, rabbit_amqqueue:list_names(VHost)), io:put_chars("kbd end\n"), ok.
"""

_READ = r"""
Lists = fun
  ({Length, Rear, Front}) when is_integer(Length), is_list(Rear) -> [Front, lists:reverse(Rear)];
  ({Length, {Rear, Front}}) when is_integer(Length) -> [Front, lists:reverse(Rear)];
  ({rabbit_fifo_q, {A, B}, {C, D}, _, _}) -> [A, B, C, D];
  ({pq, Buckets, _, _}) -> lists:append([[A, B] || {_, A, B} <- maps:values(Buckets)])
end,
Leaving = fun
  (undefined, Discards) -> lists:append(Lists(Discards));
  (Worker, Discards) -> maps:values(element(4, Worker)) ++ lists:append(Lists(Discards))
end,
Index = fun([I | _]) -> I; (Packed) -> Packed band 16#FFFFFFFFFFF end,
Show = fun(Entry) ->
  Command = case element(1, Entry) of '$usr' -> element(3, Entry); _ -> Entry end,
  Message = case element(1, Command) of
    e -> element(3, Command);
    _ -> element(tuple_size(Command), Command)
  end,
  {Key, Content} = case element(1, Message) of
    basic_message -> {hd(element(3, Message)), element(4, Message)};
    _ -> {hd(mc:routing_keys(Message)),
          mc:protocol_state(mc:prepare(read, mc:convert(mc_amqpl, Message)))}
  end,
  Properties = element(3, rabbit_binary_parser:ensure_content_decoded(Content)),
  Headers = case element(4, Properties) of
    undefined -> undefined;
    All -> lists:keydelete(<<"x-death">>, 1, All)
  end,
  {Key, iolist_to_binary(
    rabbit_framing_amqp_0_9_1:encode_properties(setelement(4, Properties, Headers)))}
end,
Updated = fun Updated(Reader) ->
  receive {ra_event, _, {_, Update}} when element(1, Update) =:= ra_log_update ->
    Updated(ra_log_reader:handle_log_update(Update, Reader))
  after 0 -> Reader end
end,
Read = fun
  (Server, {new, State}, Indexes) ->
    {ok, {Found, Next}} = ra_server_proc:read_entries(Server, Indexes, State, 60000),
    {maps:values(Found), {new, Next}};
  (_, {old, Reader}, Indexes) ->
    {Found, Next} = ra_log_reader:sparse_read(
      Updated(Reader), lists:reverse(lists:sort(Indexes)), []),
    {Found, {old, Next}}
end,
Serve = fun
  Serve([[] | Lists]) -> Serve(Lists);
  Serve(Lists) ->
    {Page, Rest} = case Lists of
      [] -> {[], []};
      [Messages | Others] ->
        try {First, Next} = lists:split(Size, Messages), {First, [Next | Others]}
        catch error:badarg -> {Messages, Others} end
    end,
    receive
      {more, Reader} -> Reader ! {positions, [Index(M) || M <- Page]}, Serve(Rest);
      {'DOWN', _, process, _, _} -> ok
    end
end,
Page = fun(Entries) ->
  try [Show(C) || {_, _, C} <- Entries]
  catch error:_ -> lists:append([try [Show(C)] catch error:_ -> [] end || {_, _, C} <- Entries])
  end
end,
Pages = fun Pages(Server, State, Holder) ->
  Holder ! {more, self()},
  receive
    {positions, []} -> ok;
    {positions, Positions} ->
      {Entries, Next} =
        try Read(Server, State, Positions)
        catch throw:_ -> {[], State}; error:_ -> {[], State}; exit:_ -> {[], State} end,
      io:put_chars(["kbd page ", integer_to_list(length(Positions)), $\s, base64:encode(
        term_to_binary(Page(Entries), [{compressed, 1}])), $\n]),
      Pages(Server, Next, Holder);
    {'DOWN', _, process, Holder, Reason} -> error(Reason)
  end
end,
Open = fun(Server) ->
  case erlang:function_exported(ra_server_proc, read_entries, 4) of
    true -> {new, undefined};
    false -> {old, ra:register_external_log_reader(Server)}
  end
end,
Queue = fun(Name) ->
  Server = {Name, node()},
  Reader = self(),
  {Holder, _} = spawn_monitor(fun() ->
    monitor(process, Reader),
    {ok, {_, {Messages, Returns, Worker, Discards}}, _} = ra:local_query(Server, fun(State) ->
      Letters = element(12, State),
      {element(3, State), element(5, State), element(2, Letters), element(3, Letters)}
    end, 60000),
    Serve(Lists(Messages) ++ Lists(Returns) ++ [[M || [_ | M] <- Leaving(Worker, Discards)]])
  end),
  try Pages(Server, Open(Server), Holder) after exit(Holder, kill) end
end,
lists:foreach(fun({Number, Name}) ->
  try
    {ok, Found} = rabbit_amqqueue:lookup(rabbit_misc:r(VHost, queue, Name)),
    rabbit_quorum_queue = amqqueue:get_type(Found),
    {Server, Leader} = amqqueue:get_pid(Found),
    io:put_chars(["kbd begin ", integer_to_list(Number), $\n]),
    erpc:call(Leader, fun() -> Queue(Server) end, infinity)
  catch _:Reason ->
    io:put_chars(["kbd skip ", integer_to_list(Number), $\s,
      base64:encode(unicode:characters_to_binary(io_lib:format("~0tP", [Reason, 12]))), $\n])
  end
end, Names), io:put_chars("kbd end\n"), ok.
"""


def list_queues(vhost: str, prefixes: Iterable[str]) -> str:
    """Write the expression that lists the queues whose names begin with any of ``prefixes``."""
    listed = ", ".join(map(_binary, prefixes))
    return f"VHost = {_binary(vhost)}, Prefixes = [{listed}], {_LIST.strip()}"


def read_queues(vhost: str, names: Iterable[str]) -> str:
    """Write the expression that reads queues, in the order in which they are given."""
    listed = ", ".join(_numbered(number, name) for number, name in enumerate(names))
    return f"VHost = {_binary(vhost)}, Size = {PAGE}, Names = [{listed}], {_READ.strip()}"


def batches(names: Iterable[str]) -> Iterator[list[str]]:
    """Split names, in their order, into lists that each fit into one expression."""
    batch: list[str] = []
    size = 0
    for name in names:
        room = len(_numbered(len(batch), name)) + 2
        if batch and size + room > LONGEST:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += room
    if batch:
        yield batch


def _numbered(number: int, name: str) -> str:
    return f"{{{number}, {_binary(name)}}}"


def _binary(text: str) -> str:
    """Write text as a binary of Erlang, whatever characters it has."""
    return f"<<{','.join(map(str, text.encode()))}>>"
