"""The clients contract on a Flower deployment; nothing here is imported unless it is asked for.

==========================  =======================================================================
``app_config``, ``app``     the settings of an app and of a kept run; a ready ``ServerApp``, and
                            what the sites get at the end
``handshake``               the hello: names, sizes, versions, data, and whether they fit together
``members``                 who takes part: the states of a node from its hello to the end
``preparing``               statistics of the sites, and one preparation for all, by sums
``server``, ``vectors``     the contract on the server's side; handles for what clients keep
``questions``               what the server can say of curvature and of own parts
``messenger``               asking those who take part, for what they say or for hidden sums
``mailbox``                 sending, polling, matching, checking; how long to wait, and for whom
``wire``                    requests and replies, and how they become Flower records
``client``, ``participant`` a ready ``ClientApp``; one client with its data and rules
``worker``                  a client at one request
``node``, ``fleet``         a site's own node; its connection to the SuperLink and its audit log
``budget``                  noise and a ledger, where a site's policy has a privacy budget
``site``                    what a site runs, gives and allows (its policy)
``flwr_private``            every name that is private to flwr, and whether it changed
``task``, ``memory``        the model that both sides build; the files of what a client keeps
``secure``                  sums that hide their terms: masks, the protocol, the sites' part in it
``trial``                   new apps, deployments on this machine, checks before a run
==========================  =======================================================================
"""
