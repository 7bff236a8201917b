"""The clients contract on a Flower deployment; nothing here is imported unless it is asked for.

==========================  =======================================================================
``app_config``, ``app``     the settings of an app; a ready ``ServerApp`` for them
``server``, ``vectors``     the contract on the server's side; handles for what clients keep
``messenger``               asking those who take part, and reading what they answer
``members``                 the first hello: names, sizes, versions, schemas; which node is whom
``mailbox``, ``deadlines``  sending, polling, matching, checking; how long to wait, and for whom
``wire``                    requests and replies, and how they become Flower records
``client``, ``worker``      a ready ``ClientApp``; one client at one request
``task``, ``memory``        the model that both sides build; the files of what a client keeps
``secure``                  sums that hide their terms: masks, the protocol, and its messages
``trial``                   new apps, deployments on this machine, checks before a run
==========================  =======================================================================
"""
