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
``client``, ``participant`` a ready ``ClientApp``; one client with its data
``worker``                  a client at one request
``plan``, ``account``       what a run may ask, signed; what a site has answered of it
``rehearsal``               finding out what an algorithm asks, for a plan
``node``                    a site's own node, and its audit log
``site``                    what a site runs and allows (its policy and privacy budget)
``flwr_private``            every name that is private to flwr: a node's connection, for instance
``task``, ``memory``        the model that both sides build; the files of what a client keeps
``secure``                  sums that hide their terms: masks, the protocol, the sites' part in it
``trial``                   new apps, deployments on this machine, checks before a run
==========================  =======================================================================
"""
