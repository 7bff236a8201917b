"""The clients contract on a Flower deployment; nothing here is imported unless it is asked for.

==========================  =======================================================================
``app_config``, ``app``     the settings of an app; a ready ``ServerApp`` for them
``kept``                    what a run keeps in its folder, so that it goes on as what it was
``round_log``               what the server app says of a run
``joining``, ``welcome``    sites that come into a run, or after its end
``withdrawal``              what a site that leaves gets in writing
``server``, ``vectors``     the contract on the server's side; handles for what clients keep
``messenger``               asking those who take part, and reading what they answer
``members``                 the first hello: names, sizes, versions, schemas; which node is whom
``mailbox``, ``deadlines``  sending, polling, matching, checking; how long to wait, and for whom
``wire``                    requests and replies, and how they become Flower records
``client``, ``worker``      a ready ``ClientApp``; one client at one request
``node``, ``node_work``     a site's own node; its work, in a process that may crash
``site``, ``audit``         what a site runs and under which name; its record of what left
``fleet``                   the node's connection to the SuperLink
``flwr_private``            every name that is private to flwr, and whether it changed
``task``, ``memory``        the model that both sides build; the files of what a client keeps
``secure``                  sums that hide their terms: masks, the protocol, and its messages
``trial``                   new apps, deployments on this machine, checks before a run
==========================  =======================================================================
"""
