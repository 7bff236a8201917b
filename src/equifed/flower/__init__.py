"""The clients contract on a Flower deployment; nothing here is imported unless it is asked for.

========================  =========================================================================
``wire``                  requests and replies, and how they become Flower records
``patience``, ``post``    deadlines and policies; sending, polling, matching, checking
``roster``                the first hello: names, sizes, versions, schemas; which node is whom
``server``, ``vectors``   the contract on the server's side, and handles for what clients keep
``client``, ``memory``    the ``ClientApp``, its local work and the files of what it keeps
``masks``, ``shamir``,    sums that hide their terms: fixed point and pairwise masks, secret
``secure``, ``sums``      sharing, the protocol, and its messages
``app``                   a ready ``ServerApp`` and ``ClientApp`` for a configuration
``deploy``, ``doctor``    local deployments, certificates and keys; checks before a run
========================  =========================================================================
"""
